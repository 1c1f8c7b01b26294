"""The checkpoint root: nothing outside it is read, listed or removed."""

from __future__ import annotations

from pathlib import Path

import pytest
from tinsmith_server.services.checkpoints.files import CheckpointFiles


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
