"""A result that waits for room on the volume holds up its own model alone, and a clean stop does not trip over it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import apsw
import pytest
from support.worker.in_process import Worker
from support.worker.process import MODEL, Call, create, save, step, train
from tinsmith_trainer.errors import JournalFull
from tinsmith_trainer.training.residency import ResidencyRules

from .conftest import StartWorker

OTHER, THIRD = "sess:train:1", "sess:train:2"
AT_ONCE = ResidencyRules(idle_seconds=0.0, turn_seconds=0.0, exchange_share=0.0)


def of(model_id: str, calls: Iterable[Call]) -> list[Call]:
    return [replace(call, model_id=model_id) for call in calls]


def find_no_room(db: Any) -> None:
    raise apsw.FullError("a result that is larger than the disk")


async def with_a_waiting_result(worker: Worker) -> None:
    """Both models have trained, and the result of MODEL's step 2 waits for room."""
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
