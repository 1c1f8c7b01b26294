"""A snapshot on request: between two operations, of what changed, on the disk before the answer."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.certificates import CLIENT
from support.engine.reference import ReferenceEngine
from support.worker.in_process import Worker
from support.worker.process import AWAIT_SECONDS, MODEL, create, step, train
from support.worker.tls_port import Port, worker_port
from tinsmith_rpc import worker_pb2
from tinsmith_trainer.checkpoints.snapshots import SnapshotFolder
from tinsmith_trainer.engines.base import Call
from tinsmith_trainer.errors import Draining
from tinsmith_trainer.training.snapshotting import SnapshotPolicy
from tinsmith_trainer.worker.peers import OPERATOR

from .conftest import StartWorker

OTHER = "sess:train:1"


@pytest.fixture
async def port(worker: Worker, tmp_path: Path) -> AsyncIterator[Port]:
    async with worker_port(worker, tmp_path) as port:
        yield port


class Gate:
    """Lets the engine's next computations begin, and end when the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entered, self.opened = threading.Event(), threading.Event()
        advance = ReferenceEngine.advance

        def wait(engine: ReferenceEngine, calls: Sequence[Call]) -> None:
            self.entered.set()
            assert self.opened.wait(AWAIT_SECONDS)
            advance(engine, calls)

        monkeypatch.setattr(ReferenceEngine, "advance", wait)


async def trained(worker: Worker) -> None:
    await worker.submit(create(), train(1), step(2), create(model_id=OTHER))
    await worker.finished(2)
    await worker.finished(0, OTHER)


def payloads_kept(worker: Worker) -> int:
    def count(db: Any) -> int:
        return int(db.execute("SELECT COUNT(*) FROM operations WHERE payload IS NOT NULL").fetchone()[0])

    return worker.service.journal.read(count).result()


@pytest.mark.parametrize(
    ("replay_seconds", "is_taken"), [(0.0, True), (60.0, False)], ids=["costly replay", "cheap replay"]
)
async def test_a_snapshot_is_taken_before_a_replay_costs_too_much(
    start: StartWorker, written: list[tuple[str, int]], replay_seconds: float, is_taken: bool
) -> None:
    worker = await start(policy=SnapshotPolicy(replay_seconds=replay_seconds, times_snapshot_cost=0.0))
    await trained(worker)
    assert ((MODEL, 2) in written) == is_taken


async def test_only_adapters_that_changed_since_their_last_snapshot_are_written(
    worker: Worker, written: list[tuple[str, int]]
) -> None:
    await trained(worker)
    written.clear()
    await worker.service.snapshot()
    assert written == [(MODEL, 2)]
    await worker.service.snapshot()
    assert written == [(MODEL, 2)]


async def test_it_is_on_the_disk_and_in_the_journal_before_the_answer(worker: Worker) -> None:
    await trained(worker)
    assert payloads_kept(worker) > 0
    await worker.service.snapshot()
    assert payloads_kept(worker) == 0
    line = worker.service.queues.find(MODEL)
    assert line is not None
    assert line.snapshot_applied == 2
    assert line.snapshot is not None
    SnapshotFolder(worker.service.parts.volume.snapshots_path).read(line.snapshot)


async def test_the_journal_forgets_inputs_below_it_and_keeps_results(worker: Worker) -> None:
    await trained(worker)
    await worker.service.snapshot()
    await worker.submit(train(3))
    await worker.finished(3)
    assert payloads_kept(worker) == 1
    assert (await worker.finished(1)).payload is not None


async def test_the_time_of_the_last_snapshot_moves_on_though_nothing_had_changed(port: Port) -> None:
    """The requester compares it with the time of its request."""
    await trained(port.worker)
    stub = port.client(port.authority.leaf(OPERATOR, usages=(CLIENT,)))
    first = await stub.Snapshot(worker_pb2.SnapshotRequest(), timeout=AWAIT_SECONDS)
    second = await stub.Snapshot(worker_pb2.SnapshotRequest(), timeout=AWAIT_SECONDS)
    assert second.last_snapshot_time > first.last_snapshot_time > 0
    described = await stub.Describe(worker_pb2.DescribeRequest(), timeout=AWAIT_SECONDS)
    assert described.last_snapshot_time == second.last_snapshot_time


async def test_it_waits_for_the_operation_that_runs_and_goes_before_the_next(
    worker: Worker, written: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    await worker.submit(create())
    await worker.finished(0)
    written.clear()
    await worker.submit(train(1), train(2))
    await asyncio.to_thread(gate.entered.wait, AWAIT_SECONDS)
    asked = asyncio.create_task(worker.service.snapshot())
    await asyncio.sleep(0)
    assert written == []
    gate.opened.set()
    await asked
    assert written == [(MODEL, 1)]


async def test_concurrent_snapshot_requests_share_one_round(
    worker: Worker, written: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    await worker.submit(create(), train(1))
    await asyncio.to_thread(gate.entered.wait, AWAIT_SECONDS)
    written.clear()
    asked = [asyncio.create_task(worker.service.snapshot()) for _ in range(5)]
    await asyncio.sleep(0)
    asked.pop().cancel()
    gate.opened.set()
    assert len(set(await asyncio.gather(*asked))) == 1
    assert written == [(MODEL, 1)]


@pytest.mark.core("durability 5")
async def test_training_continues_from_a_snapshot_bit_for_bit(start: StartWorker, tmp_path: Path) -> None:
    worker = await start()
    await trained(worker)
    await worker.service.snapshot()
    await worker.submit(train(3), step(4))
    await worker.finished(4)
    expected = worker.engine.state(MODEL).tensors
    successor = await start()
    await successor.recovered()
    for name, value in successor.engine.state(MODEL).tensors.items():
        assert value.tobytes() == expected[name].tobytes(), name


async def test_a_stopping_worker_refuses_a_requested_snapshot(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    await worker.submit(create(), train(1))
    await asyncio.to_thread(gate.entered.wait, AWAIT_SECONDS)
    asked = asyncio.create_task(worker.service.snapshot())
    await asyncio.sleep(0)
    leaving = asyncio.create_task(worker.service.drain())
    await asyncio.sleep(0)
    gate.opened.set()
    with pytest.raises(Draining):
        await asked
    await leaving
    with pytest.raises(Draining):
        await worker.service.snapshot()
