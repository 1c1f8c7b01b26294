"""Content comes through whole, whatever its pieces and the file system; its digest is that of what was written."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from support.small_disk import SmallDisk, on_small_disk
from tinsmith_trainer.disk.durable_files import BLOCK_BYTES, HEAD_BYTES, WrittenFile, read_hashed, write_file

SIZES = [0, 1, 4095, 4096, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 2 * BLOCK_BYTES + 4097]


def pieces_of(content: bytes, *ends: int) -> list[bytes | memoryview]:
    bounds = [0, *(end for end in ends if end < len(content)), len(content)]
    return [memoryview(content)[begin:end] for begin, end in pairwise(bounds)]


def content_of(size_bytes: int) -> bytes:
    return os.urandom(size_bytes)


def described(content: bytes) -> WrittenFile:
    return WrittenFile(hashlib.sha256(content).hexdigest(), len(content))


def without_direct_files(monkeypatch: pytest.MonkeyPatch) -> None:
    working = os.open

    def refuse(path: Any, flags: int, *rest: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no file here goes past the page cache")
        return working(path, flags, *rest)

    monkeypatch.setattr(os, "open", refuse)


def with_writes_that_end_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten writes, so that the remainder is no longer aligned."""
    working = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, block: working(descriptor, block[: len(block) // 2 + 1]))


@pytest.mark.parametrize("weakness", [without_direct_files, with_writes_that_end_early])
def test_a_weaker_file_system_takes_the_same_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weakness: Callable[[pytest.MonkeyPatch], None]
) -> None:
    content = content_of(BLOCK_BYTES + 5001)
    with monkeypatch.context() as weak:
        weakness(weak)
        written = write_file(tmp_path / "file", pieces_of(content, 9))
    assert (tmp_path / "file").read_bytes() == content
    assert written == described(content)


@pytest.mark.parametrize("size_bytes", [1000, BLOCK_BYTES])
def test_a_full_disk_raises_an_error_and_keeps_its_content(tmp_path: Path, size_bytes: int) -> None:
    async def scenario(disk: SmallDisk) -> None:
        (tmp_path / "file").write_bytes(b"as before")
        disk.fill()
        with pytest.raises(OSError, match="No space left"):
            write_file(tmp_path / "file", [content_of(size_bytes)])
        assert (tmp_path / "file").read_bytes() == b"as before"
        assert sorted(os.listdir(tmp_path)) == ["ballast", "file"]

    on_small_disk(tmp_path, 8, scenario)


def test_an_interrupted_write_leaves_no_part_of_it(tmp_path: Path) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_file(tmp_path / "file", [b"new"], before_rename=interrupt)
    assert os.listdir(tmp_path) == []


def test_a_large_file_leaves_the_page_cache_alone(tmp_path: Path) -> None:
    """Pages in it are memory that a limit of the container's counts."""
    write_file(tmp_path / "file", [content_of(2 * BLOCK_BYTES)])
    with (tmp_path / "file").open("rb") as file:
        try:
            read = os.preadv(file.fileno(), [bytearray(4096)], BLOCK_BYTES, os.RWF_NOWAIT)
        except BlockingIOError:
            read = 0
        except OSError as error:
            pytest.skip(f"this file system cannot say what is cached: {error.strerror}")
    assert read == 0


@pytest.mark.parametrize("size_bytes", SIZES)
def test_content_is_read_whole_into_the_memory_that_was_given_with_its_digest(tmp_path: Path, size_bytes: int) -> None:
    content = content_of(size_bytes)
    (tmp_path / "file").write_bytes(content)
    asked: list[tuple[bytes, int]] = []

    def memory_for(head: bytes, size: int) -> memoryview:
        asked.append((head, size))
        return memoryview(bytearray(size))

    read = read_hashed(tmp_path / "file", memory_for)
    assert asked == [(content[:HEAD_BYTES], size_bytes)]
    assert bytes(read.content) == content
    assert read.sha256 == described(content).sha256


def test_a_file_shortened_during_a_read_has_the_length_that_was_read(tmp_path: Path) -> None:
    """Its digest then differs from the manifest's, and nothing worse happens."""
    content = content_of(3 * BLOCK_BYTES)
    (tmp_path / "file").write_bytes(content)

    def memory_for(_: bytes, size: int) -> memoryview:
        os.truncate(tmp_path / "file", BLOCK_BYTES)
        return memoryview(bytearray(size))

    read = read_hashed(tmp_path / "file", memory_for)
    assert bytes(read.content) == content[:BLOCK_BYTES]
    assert read.sha256 == described(content[:BLOCK_BYTES]).sha256
