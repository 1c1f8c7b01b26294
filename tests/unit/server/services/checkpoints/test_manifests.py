"""Files held against their manifest: every altered one is noticed before its last part leaves."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.server.fake_worker import write_checkpoint
from tinsmith_server.errors import CheckpointDamaged
from tinsmith_server.services.checkpoints.files import CheckpointFiles
from tinsmith_server.services.checkpoints.manifests import MOST_MANIFEST_BYTES, SavedFile, checked, saved_files

PARTS = st.lists(st.binary(min_size=1, max_size=8), max_size=6)


def saved(content: bytes) -> SavedFile:
    return SavedFile(len(content), hashlib.sha256(content).hexdigest())


@given(PARTS)
def test_a_file_that_is_as_it_was_saved_passes_whole(parts: list[bytes]) -> None:
    content = b"".join(parts)
    assert b"".join(checked(iter(parts), saved(content), "file")) == content


@given(PARTS, st.binary(max_size=40))
def test_the_last_part_of_a_different_file_is_never_sent(parts: list[bytes], content: bytes) -> None:
    if b"".join(parts) == content:
        return
    sent: list[bytes] = []
    with pytest.raises(CheckpointDamaged, match="the file weights was altered"):
        sent.extend(checked(iter(parts), saved(content), "weights"))
    assert sent == parts[:-1]


def test_one_part_is_held_at_a_time() -> None:
    """A file of any size takes two parts of memory."""
    read = 0

    def parts() -> Iterator[bytes]:
        nonlocal read
        for number in range(9):
            read += 1
            yield bytes([number])

    for number, _ in enumerate(checked(parts(), saved(bytes(range(9))), "file"), start=1):
        assert read <= number + 1


def test_a_manifest_is_known_by_its_digest(tmp_path: Path) -> None:
    digest = write_checkpoint(tmp_path / "one", {"a": b"1", "b": b"22"})
    files = CheckpointFiles(tmp_path.as_uri())
    assert saved_files(files, "one", digest) == {"a": saved(b"1"), "b": saved(b"22")}
    with pytest.raises(CheckpointDamaged, match="its manifest differs from the saved one"):
        saved_files(files, "one", "0" * 64)
    with pytest.raises(FileNotFoundError):
        saved_files(files, "two", digest)


def test_a_manifest_that_was_made_endless_is_not_read_to_its_end(tmp_path: Path) -> None:
    folder = tmp_path / "one"
    folder.mkdir()
    with (folder / "manifest.json").open("wb") as file:
        file.truncate(MOST_MANIFEST_BYTES * 2**20)
    with pytest.raises(CheckpointDamaged):
        saved_files(CheckpointFiles(tmp_path.as_uri()), "one", "0" * 64)


@pytest.mark.parametrize(("content", "state"), [(None, "is missing"), (b"333", "has 3 bytes")])
def test_a_file_that_is_missing_or_of_another_size_is_named(tmp_path: Path, content: bytes | None, state: str) -> None:
    digest = write_checkpoint(tmp_path / "one", {"a": b"1", "b": b"22"})
    (tmp_path / "one" / "b").unlink()
    if content is not None:
        (tmp_path / "one" / "b").write_bytes(content)
    with pytest.raises(CheckpointDamaged, match=f"b {state}, and its manifest says 2 bytes"):
        saved_files(CheckpointFiles(tmp_path.as_uri()), "one", digest)
