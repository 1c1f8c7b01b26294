"""The checkpoint root: nothing outside it is read, listed or removed."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tinsmith_server.services.checkpoints.files import CheckpointFiles, UploadedFile


@pytest.fixture
def root(tmp_path: Path) -> Path:
    directory = tmp_path / "root" / "runs" / "1"
    (directory / "deep").mkdir(parents=True)
    (directory / "a.bin").write_bytes(b"12345")
    (directory / "deep" / "b.bin").write_bytes(b"1")
    (directory / "manifest.json").write_text("{}")
    (tmp_path / "outside").write_text("secret")
    return tmp_path / "root"


@pytest.mark.parametrize("path", ["", ".", "..", "../outside", "runs/../..", "/etc", "runs/1/../../../outside"])
def test_nothing_outside_the_root_is_touched(root: Path, path: str) -> None:
    files = CheckpointFiles(root.as_uri())
    for use in (files.list, files.remove):
        with pytest.raises(FileNotFoundError):
            use(path)
    with pytest.raises(FileNotFoundError):
        files.read("runs", "../../outside")


class Bucket:
    """A file system of objects. An object exists after its file is closed, unless the file was discarded."""

    async_impl = True

    def __init__(self) -> None:
        self.objects: list[str] = []
        self.discarded = False

    def open(self, path: str, _mode: str, **_options: object) -> Bucket:
        self.path, self.closed = path, False
        return self

    def write(self, _part: bytes) -> None:
        pass

    def discard(self) -> None:
        self.discarded = True

    def close(self) -> None:
        if not self.closed:
            self.objects.append(self.path)


@pytest.mark.parametrize("given_up", [False, True])
def test_an_upload_to_a_bucket_that_is_given_up_leaves_no_object(given_up: bool) -> None:
    """The garbage collector closes a file, and a file that is closed becomes an object."""
    bucket = Bucket()
    file = UploadedFile(cast(Any, SimpleNamespace(reaching=contextlib.nullcontext)), bucket, "uploads/a")
    file.write(b"part")
    file.give_up() if given_up else file.finish()
    bucket.close()
    assert bucket.discarded is given_up
    assert set(bucket.objects) == (set() if given_up else {"uploads/a"})
