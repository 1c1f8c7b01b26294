"""The power goes, and with it all that was not synced: nothing acknowledged is lost.

After every operation that was acknowledged, and after every result that was seen, the disk is taken as it
would be if the power went then. A new worker on that disk must know every one of them, and end with
the same bytes as an undisturbed run.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from support.worker.faulting_files import AT_ONE_MOMENT, LossyFolders, LossyVfs, lossy_vfs, restore
from support.worker.in_process import Worker
from support.worker.process import broken_train, create, save, save_ephemeral, step, train
from tinsmith_trainer.oplog.journal_tables import OperationResult
from tinsmith_trainer.training.snapshotting import SnapshotPolicy

PROGRAM = [
    create(),
    *(train(1), step(2), save(3, "middle")),
    *(train(4, (5, 3, 5)), broken_train(5), step(6)),
    *(train(7, (8, 9, 7)), save_ephemeral(8), step(9), save(10, "final")),
]
EAGER = SnapshotPolicy(replay_seconds=0, times_snapshot_cost=0)


@dataclass
class Moment:
    """A moment of a power cut: what clients knew, and what the disk held."""

    disk: dict[Path, bytes]
    acknowledged: list[int]
    seen: dict[int, OperationResult] = field(default_factory=dict)


@pytest.fixture
def vfs() -> Iterator[LossyVfs]:
    with lossy_vfs("power") as vfs:
        yield vfs


@asynccontextmanager
async def running(folder: Path, epoch: int, vfs: str | None = None) -> AsyncIterator[Worker]:
    worker = Worker(folder, policy=EAGER, journal_vfs=vfs)
    await worker.service.activate(epoch)
    yield worker
    await worker.service.drain()


async def finish(worker: Worker, already: list[int]) -> dict[int, OperationResult]:
    """Submit the operations that were never acknowledged, and return all results."""
    await worker.submit(*(call for call in PROGRAM if call.seq_id not in already))
    return {call.seq_id: await worker.finished(call.seq_id) for call in PROGRAM}


def without_event_ids(results: dict[int, OperationResult]) -> dict[int, OperationResult]:
    """Return the events without IDs, which begin at the clock of their volume."""
    return {seq_id: replace(result, event_id=result.event_id and 1) for seq_id, result in results.items()}


def final_files(folder: Path) -> dict[str, bytes]:
    [directory] = (folder / "checkpoints" / "weights" / "sess.train.0").glob("10-*")
    return {path.name: path.read_bytes() for path in directory.iterdir()}


async def record_moments(root: Path, monkeypatch: pytest.MonkeyPatch, vfs: LossyVfs) -> list[Moment]:
    """Run the program once, waiting for each result, and copy the disk at each step."""
    moments: list[Moment] = []
    root.mkdir()
    folders = LossyFolders(root, monkeypatch)
    acknowledged: list[int] = []
    seen: dict[int, OperationResult] = {}

    def take() -> None:
        with AT_ONE_MOMENT:
            disk = folders.image() | vfs.image()
        moments.append(Moment(disk, list(acknowledged), dict(seen)))

    async with running(root, epoch=1, vfs="power") as worker:
        for call in PROGRAM:
            await worker.submit(call)
            acknowledged.append(call.seq_id)
            take()
            seen[call.seq_id] = await worker.finished(call.seq_id)
            take()
    monkeypatch.undo()
    return moments


async def test_no_moment_for_a_power_cut_is_a_bad_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, vfs: LossyVfs
) -> None:
    async with running(tmp_path / "undisturbed", epoch=1) as worker:
        expected = await finish(worker, [])
    moments = await record_moments(tmp_path / "recorded", monkeypatch, vfs)
    assert len(moments) == 2 * len(PROGRAM)
    for number, moment in enumerate(moments):
        folder = tmp_path / f"after-{number}"
        folder.mkdir()
        restore(moment.disk, tmp_path / "recorded", folder)
        async with running(folder, epoch=2) as worker:
            results = await finish(worker, moment.acknowledged)
        assert {seq_id: results[seq_id] for seq_id in moment.seen} == moment.seen
        assert without_event_ids(results) == without_event_ids(expected)
        assert final_files(folder) == final_files(tmp_path / "undisturbed")


async def test_the_disk_image_loses_unsynced_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above could not fail otherwise."""
    folders = LossyFolders(tmp_path, monkeypatch)
    (tmp_path / "unsynced").write_bytes(b"lost")
    assert folders.image() == {}
