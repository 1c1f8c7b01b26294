"""Room on a disk: what is promised and allocated, on file systems that know little of it too."""

from __future__ import annotations

from pathlib import Path

from support.small_disk import MIB, SmallDisk, on_disk_without_size
from tinsmith_trainer.checkpoints.storage import CheckpointStorage


def test_a_save_goes_to_a_file_system_that_states_no_size(tmp_path: Path) -> None:
    async def scenario(disk: SmallDisk) -> None:
        storage = CheckpointStorage(f"file://{disk.folder}/root", reserved_bytes=MIB)
        storage.write("model", {"weights": [b"x"]}, "last", lambda written: b"1")
        assert storage.read("model", ["weights", "last"]) == {"weights": b"x", "last": b"1"}

    on_disk_without_size(tmp_path, scenario)
