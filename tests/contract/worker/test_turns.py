"""Operations of thousands of datums give way between microbatches, and are still one operation each."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from support.engine.contract import state_bits
from support.engine.reference import MICROBATCH_DATUMS, ReferenceCall, ReferenceEngine
from support.worker.in_process import Worker
from support.worker.process import AWAIT_SECONDS, MODEL, TOKENS_OF_MANY, create, step, train_many
from tinsmith_trainer.checkpoints.snapshots import SnapshotFolder
from tinsmith_trainer.engines.base import Call
from tinsmith_trainer.oplog.model_queue import Entry, ModelQueue
from tinsmith_trainer.training.fair_shares import HEAD_START_TOKENS, Pace
from tinsmith_trainer.training.training_calls import MOST_CALLS, TrainingCall, TrainingCalls

from .conftest import StartWorker

OTHER = "sess:train:1"
MANY = 3000


class Hold:
    """A microbatch that waits in the engine until the test releases it."""

    def __init__(self) -> None:
        self.entered, self.opened = threading.Event(), threading.Event()

    async def reached(self) -> None:
        assert await asyncio.to_thread(self.entered.wait, AWAIT_SECONDS)

    def let_go(self) -> None:
        self.opened.set()


class Microbatches:
    """The computed microbatches in their order; by model and number, from 1: which wait, and which fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.computed: list[str] = []
        self.holds: dict[tuple[str, int], Hold] = {}
        self.failing: set[tuple[str, int]] = set()
        advance = ReferenceEngine.advance

        def watched(engine: ReferenceEngine, calls: Sequence[ReferenceCall]) -> None:
            [call] = calls
            model_id = call.work.adapter_id
            self._arrive((model_id, self.computed.count(model_id) + 1))
            advance(engine, calls)
            self.computed.append(model_id)

        monkeypatch.setattr(ReferenceEngine, "advance", watched)

    def hold(self, model_id: str, number: int) -> Hold:
        return self.holds.setdefault((model_id, number), Hold())

    def _arrive(self, place: tuple[str, int]) -> None:
        if place in self.holds:
            hold = self.holds.pop(place)
            hold.entered.set()
            assert hold.opened.wait(AWAIT_SECONDS)
        if place in self.failing:
            self.failing.remove(place)
            raise RuntimeError("no memory left")


@pytest.fixture
def microbatches(monkeypatch: pytest.MonkeyPatch) -> Microbatches:
    return Microbatches(monkeypatch)


async def models_of(worker: Worker, **tenants: int) -> dict[str, list[str]]:
    """Return the models, this many of each tenant."""
    made = {tenant: [f"sess-{tenant}:train:{number}" for number in range(count)] for tenant, count in tenants.items()}
    for tenant, models in made.items():
        for model_id in models:
            await worker.submit(create(model_id=model_id), tenant=tenant)
            await worker.finished(0, model_id)
    return made


async def test_a_forward_of_another_tenant_waits_for_the_microbatch_that_runs(
    worker: Worker, microbatches: Microbatches
) -> None:
    made = await models_of(worker, alice=1, bob=1)
    [alices], [bobs] = made.values()
    fifth, eighth = microbatches.hold(alices, 5), microbatches.hold(alices, 8)
    await worker.submit(train_many(1, MANY, alices))
    await fifth.reached()
    await worker.submit(train_many(1, 1, bobs, forward_only=True))
    fifth.let_go()
    await eighth.reached()
    assert (await worker.finished(1, bobs)).failure is None
    assert microbatches.computed == [*[alices] * 5, bobs, *[alices] * 2]
    eighth.let_go()
    assert (await worker.finished(1, alices)).failure is None
    assert microbatches.computed.count(alices) == MANY // MICROBATCH_DATUMS


async def test_a_tenant_of_many_models_gets_no_more_than_one_of_one(worker: Worker, microbatches: Microbatches) -> None:
    made = await models_of(worker, alice=6, bob=1)
    [bobs] = made["bob"]
    held = microbatches.hold(made["alice"][0], 1)
    for model_id in made["alice"]:
        await worker.submit(train_many(1, 40 * MICROBATCH_DATUMS, model_id))
    await held.reached()
    await worker.submit(train_many(1, 120 * MICROBATCH_DATUMS, bobs))
    held.let_go()
    await worker.finished(1, bobs)
    meanwhile = microbatches.computed[: last_index(microbatches.computed, bobs) + 1]
    start = HEAD_START_TOKENS // (MICROBATCH_DATUMS * TOKENS_OF_MANY)
    clock = 12  # what looking for an adapter takes is charged by the clock, which a busy machine stops
    assert abs(sum(model_id != bobs for model_id in meanwhile) - (120 - start)) <= clock


async def test_a_tenant_with_a_share_of_twice_the_weight_gets_twice_as_much(
    worker: Worker, microbatches: Microbatches
) -> None:
    made = await models_of(worker, alice=1, bob=1)
    [alices], [bobs] = made.values()
    held = microbatches.hold(alices, 1)
    await worker.submit(train_many(1, 160 * MICROBATCH_DATUMS, alices), tenant="alice", share_weight=2.0)
    await held.reached()
    await worker.submit(train_many(1, 160 * MICROBATCH_DATUMS, bobs), tenant="bob")
    held.let_go()
    await worker.finished(1, alices)
    meanwhile = microbatches.computed[: last_index(microbatches.computed, alices) + 1]
    start = HEAD_START_TOKENS // (MICROBATCH_DATUMS * TOKENS_OF_MANY)
    assert abs(meanwhile.count(bobs) - 160 // 2 - start) <= 12
    await worker.finished(1, bobs)


async def test_a_sender_of_bodies_that_take_long_to_read_is_charged_for_reading_them(
    worker: Worker, microbatches: Microbatches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two million empty fields, say: otherwise each such call would delay the next of everyone else."""
    made = await models_of(worker, alice=1, bob=1, carol=1)
    [alices], [bobs], [carols] = made.values()
    begin, held = TrainingCalls.begin, Hold()

    def begun(self: TrainingCalls, queue: ModelQueue, entry: Entry, payload: bytes) -> TrainingCall:
        operation = entry.operation
        until = time.thread_time() + 0.1 * (operation.model_id == alices)
        while time.thread_time() < until:
            pass
        if operation.model_id == carols and operation.seq_id == 2:
            held.entered.set()
            assert held.opened.wait(AWAIT_SECONDS)
        return begin(self, queue, entry, payload)

    monkeypatch.setattr(TrainingCalls, "begin", begun)
    # A tenth of a second is worth 1,000 tokens, on a busy machine as well: more than all calls of the other.
    monkeypatch.setattr(Pace, "worth", lambda self, seconds: round(max(seconds, 0.0) * 10_000))
    await worker.submit(train_many(1, 1, carols), train_many(2, 1, carols))
    await held.reached()
    for number in range(1, 31):
        await worker.submit(train_many(number, 1, alices), train_many(number, 1, bobs))
    held.let_go()
    await worker.finished(30, bobs)
    assert microbatches.computed[: last_index(microbatches.computed, bobs)].count(alices) <= 3


async def test_few_calls_are_under_way_at_once_and_each_tenant_may_have_one(
    start: StartWorker, microbatches: Microbatches, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = await start(slots=MOST_CALLS + 3)
    made = await models_of(worker, alice=MOST_CALLS + 2, bob=1)
    under_way, most = Counter[str](), Counter[str]()
    start, finish = ReferenceEngine.start, ReferenceEngine.finish

    def started(engine: ReferenceEngine, work: object) -> Call:
        call = start(engine, work)  # type: ignore[arg-type]
        tenant = "bob" if call.work.adapter_id in made["bob"] else "alice"  # type: ignore[attr-defined]
        under_way[tenant] += 1
        most[tenant] = max(most[tenant], under_way[tenant])
        return call

    def finished(engine: ReferenceEngine, call: ReferenceCall) -> object:
        under_way["bob" if call.work.adapter_id in made["bob"] else "alice"] -= 1
        return finish(engine, call)

    monkeypatch.setattr(ReferenceEngine, "start", started)
    monkeypatch.setattr(ReferenceEngine, "finish", finished)
    first, last = microbatches.hold(made["alice"][0], 1), microbatches.hold(made["alice"][MOST_CALLS - 1], 1)
    for model_id in made["alice"]:
        await worker.submit(train_many(1, 40 * MICROBATCH_DATUMS, model_id))
    await first.reached()
    first.let_go()
    await last.reached()
    await worker.submit(train_many(1, 5 * MICROBATCH_DATUMS, made["bob"][0]))
    last.let_go()
    for model_id in (*made["alice"], *made["bob"]):
        await worker.finished(1, model_id)
    assert most == {"alice": MOST_CALLS, "bob": 1}


async def test_results_and_states_are_those_of_operations_one_after_the_other(
    start: StartWorker, tmp_path: Path, microbatches: Microbatches
) -> None:
    alone, together = Worker(tmp_path / "alone"), await start()
    await alone.service.activate(1)
    program = [train_many(1, 100), train_many(2, 30), step(3), train_many(4, 50)]
    others = [train_many(1, 90, OTHER), replace(step(2), model_id=OTHER), train_many(3, 20, OTHER, forward_only=True)]
    results: list[list[object]] = [[], []]
    for worker, found in zip((alone, together), results, strict=True):
        await worker.submit(create(), create(model_id=OTHER))
        await worker.finished(0, OTHER)
        microbatches.computed.clear()
        held = microbatches.hold(MODEL, 1)
        await worker.submit(program[0])
        await held.reached()
        if worker is together:
            await worker.submit(*program[1:], *others)
        held.let_go()
        for call in program:
            await worker.submit(call)
            found.append(await worker.finished(call.seq_id))
        for call in others:
            await worker.submit(call)
            found.append(await worker.finished(call.seq_id, OTHER))
        found += [state_bits(worker.engine.state(model_id)) for model_id in (MODEL, OTHER)]
    assert OTHER in microbatches.computed[:3]
    assert results[0] == results[1]
    await alone.service.drain()


async def test_a_snapshot_within_an_operation_is_of_the_model_before_it(
    start: StartWorker, microbatches: Microbatches, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[tuple[int, str]] = []
    write = SnapshotFolder.write
    monkeypatch.setattr(
        SnapshotFolder,
        "write",
        lambda folder, one: (written.append((one.applied, state_bits(one.state))), write(folder, one))[1],
    )
    worker = await start()
    await worker.submit(create(), train_many(1, 5), step(2))
    await worker.finished(2)
    before = state_bits(worker.engine.state(MODEL))
    held = microbatches.hold(MODEL, 4)
    await worker.submit(train_many(3, 100))
    await held.reached()
    asked = asyncio.create_task(worker.service.snapshot())
    await asyncio.sleep(0)
    held.let_go()
    await asked
    assert written[-1] == (2, before)
    assert (await worker.finished(3)).failure is None


async def test_the_tenant_of_a_model_outlives_the_process(start: StartWorker) -> None:
    worker = await start()
    await worker.submit(create(), tenant="ada")
    await worker.finished(0)
    await worker.submit(train_many(1, 1))
    successor = await start()
    queue = successor.service.queues.find(MODEL)
    assert queue is not None
    assert queue.tenant == "ada"


async def test_a_stop_waits_for_a_microbatch_and_leaves_the_operation_to_the_next_start(
    start: StartWorker, tmp_path: Path, microbatches: Microbatches
) -> None:
    undisturbed = Worker(tmp_path / "undisturbed")
    await undisturbed.service.activate(1)
    await undisturbed.submit(create(), train_many(1, 100))
    expected = await undisturbed.finished(1)
    microbatches.computed.clear()

    worker = await start()
    await worker.submit(create())
    await worker.finished(0)
    held = microbatches.hold(MODEL, 5)
    await worker.submit(train_many(1, 100))
    await held.reached()
    ending = asyncio.create_task(worker.service.drain())
    while not worker.service.queues.is_stopping:
        await asyncio.sleep(0)
    held.let_go()
    await ending
    assert microbatches.computed == [MODEL] * 5

    successor = await start()
    assert await successor.finished(1) == expected
    await successor.submit(step(2))
    await undisturbed.submit(step(2))
    assert await successor.finished(2) == await undisturbed.finished(2)
    await undisturbed.service.drain()


async def test_a_microbatch_that_fails_fails_its_own_operation_alone(
    worker: Worker, microbatches: Microbatches
) -> None:
    await worker.submit(create(), create(model_id=OTHER))
    await worker.finished(0, OTHER)

    microbatches.failing.add((MODEL, 4))
    await worker.submit(train_many(1, 100), step(2), train_many(1, 100, OTHER), train_many(3, 9), step(4))
    assert "no memory left" in await worker.failure(1)
    assert "forward_backward 1 failed" in await worker.failure(2)
    assert (await worker.finished(1, OTHER)).failure is None
    assert (await worker.finished(4)).failure is None
    assert Counter(microbatches.computed) == {MODEL: 3 + 2, OTHER: 13}


def last_index(found: Sequence[str], item: str) -> int:
    return len(found) - 1 - found[::-1].index(item)
