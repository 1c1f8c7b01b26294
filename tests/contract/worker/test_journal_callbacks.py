"""Callbacks of the journal take effect in memory, or the process ends and the next one begins with the disk."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future

import pytest
from support.worker.in_process import Worker
from support.worker.process import AWAIT_SECONDS, Call, create, train
from tinsmith_trainer.oplog.model_queue import KeptPayloads
from tinsmith_trainer.oplog.model_queues import GAP_CLOSES_AFTER_SECONDS, ModelQueues
from tinsmith_trainer.oplog.ordering import OperationOrder
from tinsmith_trainer.worker.admission import Admission

from .test_life import release


@pytest.mark.parametrize(
    ("callback", "calls"),
    [
        ("_add_accepted", [create()]),
        ("_settle_late", [create(), train(1), release(), train(2)]),
        ("_kept.take", [create(), train(1), release(), train(2)]),
        ("close_below", [create(), train(2)]),
        ("release", [create()]),
    ],
)
async def test_a_worker_that_cannot_record_operations_on_disk_ends(
    worker: Worker, ended: Future[int], monkeypatch: pytest.MonkeyPatch, callback: str, calls: list[Call]
) -> None:
    """An error in a callback of the journal: the operation was acknowledged, and would never run."""
    for call in calls[:-1]:
        await worker.submit(call)
        await worker.finished(call.seq_id)
    _fail_in(monkeypatch, callback)
    await worker.submit(calls[-1])
    for _ in range(2):
        worker.service.queues.age_gaps(GAP_CLOSES_AFTER_SECONDS)
    assert await asyncio.wait_for(asyncio.wrap_future(ended), AWAIT_SECONDS) == 1


def _fail_in(monkeypatch: pytest.MonkeyPatch, callback: str) -> None:
    def fail(*_: object, **__: object) -> None:
        raise MemoryError("no memory left")

    places: dict[str, object] = {"close_below": OperationOrder, "release": Admission, "_kept.take": KeptPayloads}
    monkeypatch.setattr(places.get(callback, ModelQueues), callback.rpartition(".")[2], fail)
