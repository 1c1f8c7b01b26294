"""Saves: they leave no snapshot, and what a client has heard of one is never made again."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.worker.in_process import Worker
from support.worker.process import MODEL, create, save, save_ephemeral, step, train
from tinsmith_trainer.checkpoints.snapshots import Snapshot, SnapshotFile, SnapshotFolder
from tinsmith_trainer.training.residency import ResidencyRules

from .conftest import StartWorker
from .test_parking import bits
from .test_poorer_starts import crash

OTHER = "sess:train:1"
AT_ONCE = ResidencyRules(idle_seconds=0.0, turn_seconds=0.0, exchange_share=0.0)


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Model and last operation of every snapshot that is written."""
    found: list[tuple[str, int]] = []
    write = SnapshotFolder.write

    def note(folder: SnapshotFolder, snapshot: Snapshot) -> SnapshotFile:
        found.append((snapshot.model_id, snapshot.applied))
        return write(folder, snapshot)

    monkeypatch.setattr(SnapshotFolder, "write", note)
    return found


def checkpoints(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


async def test_a_save_leaves_no_snapshot(worker: Worker, written: list[tuple[str, int]]) -> None:
    await worker.submit(create(), train(1), step(2), save(3, "a"), save_ephemeral(4))
    await worker.finished(4)
    assert written == [(MODEL, 0)]


async def test_a_replay_passes_over_a_save_that_has_a_result(
    start: StartWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = await start()
    await worker.submit(create(), train(1), save(2, "a"), step(3), save_ephemeral(4), train(5))
    await worker.finished(5)
    expected, files = bits(worker.engine.state(MODEL)), checkpoints(tmp_path / "checkpoints")
    crash(worker, monkeypatch)
    successor = await start()
    await successor.submit(save(6, "a"))
    assert "exists already" in await successor.failure(6)
    assert bits(successor.engine.state(MODEL)) == expected
    assert checkpoints(tmp_path / "checkpoints") == files


async def test_the_snapshot_before_a_save_is_as_good_after_it(
    start: StartWorker, written: list[tuple[str, int]]
) -> None:
    """An adapter that leaves memory after saves alone costs no snapshot, and comes back as it was."""
    worker = await start()
    await worker.submit(create(), train(1), step(2))
    await worker.finished(2)
    await worker.service.snapshot()
    expected = bits(worker.engine.state(MODEL))
    await worker.submit(save(3, "a"), save_ephemeral(4))
    await worker.finished(4)
    written.clear()
    successor = await start()
    await successor.submit(save(5, "b"))
    await successor.finished(5)
    queue = successor.service.queues.find(MODEL)
    assert queue is not None
    assert queue.snapshot_applied == 4
    assert (MODEL, 4) not in written
    assert bits(successor.engine.state(MODEL)) == expected


async def test_a_gradient_that_never_came_below_a_save_is_in_the_next_snapshot(start: StartWorker) -> None:
    """It fails the next step, whatever the model went through meanwhile."""
    worker = await start(slots=1, places=2, residency=AT_ONCE)
    await worker.submit(create(), save(2, "a"))
    await worker.finished(2)
    await worker.submit(create(model_id=OTHER))
    await worker.finished(0, OTHER)
    await worker.submit(train(3), step(4))
    assert "operation 1 of this model never arrived" in await worker.failure(4)
