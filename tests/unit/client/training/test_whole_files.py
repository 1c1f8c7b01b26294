"""A small file is whole, or as it was."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.small_disk import SmallDisk, on_small_disk
from tinsmith.training.whole_files import write_whole


def test_on_a_full_disk_the_file_is_as_it_was_and_nothing_is_beside_it(tmp_path: Path) -> None:
    async def scenario(disk: SmallDisk) -> None:
        write_whole(tmp_path / "file", "as before")
        disk.fill()
        with pytest.raises(OSError, match="No space left"):
            write_whole(tmp_path / "file", b"x" * 10_000)
        assert (tmp_path / "file").read_text() == "as before"
        assert sorted(os.listdir(tmp_path)) == ["ballast", "file"]

    on_small_disk(tmp_path, 1, scenario)
