"""Room on a disk: what is promised and allocated, on file systems that know little of it too."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from structlog.testing import capture_logs
from support.small_disk import MIB, SmallDisk, on_disk_without_size, on_small_disk
from tinsmith_trainer.checkpoints.storage import CheckpointStorage, StorageFault
from tinsmith_trainer.disk import free_space
from tinsmith_trainer.disk.durable_files import WrittenFile
from tinsmith_trainer.disk.free_space import DiskRoom, RetriesForRoom


def test_nothing_is_written_where_blocks_cannot_be_allocated(tmp_path: Path) -> None:
    """Over a network, one byte for each 4 KiB is one request for each."""

    async def scenario(disk: SmallDisk) -> None:
        with (disk.folder / "file").open("wb") as file:
            DiskRoom(disk.folder).allocate(file.fileno(), MIB)
            assert os.fstat(file.fileno()).st_size == 0

    on_disk_without_size(tmp_path, scenario)


def test_room_can_be_claimed_while_a_file_is_given_its_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop claims it."""
    room, allocate = DiskRoom(tmp_path), free_space._fallocate
    loop = ThreadPoolExecutor(1)

    def slow(*arguments: int) -> int:
        loop.submit(room.claim, MIB).result(10)
        return int(allocate(*arguments))

    monkeypatch.setattr(free_space, "_fallocate", slow)
    with (tmp_path / "file").open("wb") as file:
        room.allocate(file.fileno(), MIB)
        assert os.fstat(file.fileno()).st_blocks * free_space.BLOCK_BYTES >= MIB
    loop.shutdown()


def test_a_reserve_without_blocks_is_reported_once_and_leaves_no_file(tmp_path: Path) -> None:
    async def scenario(disk: SmallDisk) -> None:
        room = DiskRoom(disk.folder, MIB, disk.folder / "reserve")
        with capture_logs() as logs:
            for _ in range(3):
                room.keep_reserve()
        assert [(each["log_level"], each["reason"]) for each in logs] == [
            ("warning", "its file system allocates no blocks")
        ]
        assert not (disk.folder / "reserve").exists()
        assert not room.free_reserve()

    on_disk_without_size(tmp_path, scenario)


def test_repeated_failures_for_lack_of_space_wait_longer_until_more_is_free(tmp_path: Path) -> None:
    async def scenario(disk: SmallDisk) -> None:
        now = 0.0
        disk.fill()
        retries = RetriesForRoom(DiskRoom(disk.folder), lambda: now)
        retries.begin()
        waits = []
        for _ in range(7):
            failed_at = now
            while not retries.is_due():
                now += 0.5
            waits.append(now - failed_at)
            retries.failed()
        assert waits == [1, 2, 4, 8, 16, 30, 30]
        now += 1
        assert not retries.is_due()
        disk.make_room()
        assert retries.is_due()
        retries.begin()
        now += 1
        assert retries.is_due()

    on_small_disk(tmp_path, 16, scenario)


def test_a_save_that_is_being_written_takes_its_room_once(tmp_path: Path) -> None:
    """Another file that fits as well is written at the same time."""

    async def scenario(disk: SmallDisk) -> None:
        storage = CheckpointStorage(f"file://{disk.folder}/root")
        files = {"weights": [bytes(7 * MIB)], "moments": [bytes(MIB)]}

        def write_another(written: dict[str, WrittenFile]) -> bytes:
            storage.write("other", {"weights": [bytes(6 * MIB)]}, "last", lambda _: b"1")
            return b"1"

        storage.write("model", files, "last", write_another)
        with pytest.raises(StorageFault, match="make room"):
            storage.write("third", files, "last", lambda _: b"1")

    on_small_disk(tmp_path, 16, scenario)
