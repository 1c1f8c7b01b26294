"""Results and creates that wait for room on the volume: they hold up their own model alone, and no clean stop."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import apsw
import pytest
from support.worker.in_process import Worker
from support.worker.process import MODEL, Call, create, save, step, train
from tinsmith_trainer.checkpoints.snapshots import Snapshot, SnapshotFile, SnapshotFolder
from tinsmith_trainer.disk import free_space
from tinsmith_trainer.errors import JournalFull
from tinsmith_trainer.oplog.model_queues import GAP_CLOSES_AFTER_SECONDS
from tinsmith_trainer.training.residency import ResidencyRules

from .conftest import StartWorker

OTHER, THIRD = "sess:train:1", "sess:train:2"
AT_ONCE = ResidencyRules(idle_seconds=0.0, turn_seconds=0.0, exchange_share=0.0)


def of(model_id: str, calls: Iterable[Call]) -> list[Call]:
    return [replace(call, model_id=model_id) for call in calls]


def find_no_room(db: Any) -> None:
    raise apsw.FullError("a result that is larger than the disk")


async def with_a_waiting_result(worker: Worker) -> None:
    """Return a worker whose two models have trained, and whose result of MODEL's step 2 waits for room."""
    for call in (*of(MODEL, [create(), train(1)]), *of(OTHER, [create(), train(1)])):
        await worker.submit(call)
        await worker.finished(call.seq_id, call.model_id)
    worker.service.journal.write(find_no_room, must_succeed=True, model_id=MODEL)
    await worker.submit(step(2))
    queue = worker.service.queues.find(MODEL)
    assert queue is not None
    while queue.order.applied < 2:
        await asyncio.sleep(0.01)
    assert await worker.is_pending(2)


async def test_a_stop_saves_the_other_models_and_leaves_the_result_to_the_next_process(
    start: StartWorker, written: list[tuple[str, int]]
) -> None:
    worker = await start()
    await with_a_waiting_result(worker)
    written.clear()
    await worker.service.drain()
    assert written == [(OTHER, 1)], "a snapshot with step 2 would hide from the next process that it has to run"
    worker = await start()
    assert (await worker.finished(2)).failure is None
    assert worker.engine.state(MODEL).optimizer_step == 1


async def test_other_models_are_saved_snapshot_and_parked(start: StartWorker, written: list[tuple[str, int]]) -> None:
    worker = await start(slots=2, residency=AT_ONCE)
    await with_a_waiting_result(worker)
    for call in of(OTHER, [step(2), save(3, "mine")]):
        await worker.submit(call)
        assert (await worker.finished(call.seq_id, OTHER)).failure is None
    written.clear()
    with pytest.raises(JournalFull, match="make room"):
        await worker.service.snapshot()
    assert written == [(OTHER, 3)]
    await worker.submit(create(model_id=THIRD))
    assert (await worker.finished(0, THIRD)).failure is None
    assert set(worker.engine._adapters) == {MODEL, THIRD}


async def test_a_create_that_is_undone_again_and_again_runs_less_often(
    start: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(free_space, "ROOM_RETRY_SECONDS", 0.01)
    monkeypatch.setattr(free_space, "LONGEST_ROOM_RETRY_SECONDS", 0.04)
    worker = await start()
    waits: list[float] = []
    write = SnapshotFolder.write

    def refuse_five(folder: SnapshotFolder, snapshot: Snapshot) -> SnapshotFile:
        """Refuse five writes, as a quota does, though the disk reports free space."""
        queue = worker.service.queues.find(MODEL)
        assert queue is not None
        waits.append(queue.undone_seconds)
        if len(waits) <= 5:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        return write(folder, snapshot)

    monkeypatch.setattr(SnapshotFolder, "write", refuse_five)
    await worker.submit(create())
    assert (await worker.finished(0)).failure is None
    assert waits == [0.0, 0.01, 0.02, 0.04, 0.04, 0.04]


async def test_a_gap_is_closed_by_one_write_however_long_that_waits(start: StartWorker) -> None:
    worker = await start()
    await worker.submit(create(), train(2))
    await worker.finished(0)
    journal = worker.service.journal
    journal.write(find_no_room, must_succeed=True, model_id=MODEL)
    worker.service.queues.age_gaps(0)
    for _ in range(3):
        worker.service.queues.age_gaps(GAP_CLOSES_AFTER_SECONDS)
    journal.settle(OTHER)
    assert len(journal._waiting) == 2, "one that fits behind one that never does"
    assert await worker.is_pending(2)
