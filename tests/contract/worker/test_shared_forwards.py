"""Microbatches of several models in one forward: owners, charges and isolation."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from support.engine.contract import state_bits
from support.engine.reference import ReferenceCall, ReferenceEngine
from support.worker.in_process import Worker
from support.worker.process import AWAIT_SECONDS, create, step, train, train_many
from tinsmith_trainer.training.co_batching import ForwardTimes

from .conftest import StartWorker

MODELS = [f"sess-{number}:train:0" for number in range(6)]
PROGRAM = [train(1), train_many(2, 30), train(3, (5, 3, 5)), step(4), train(5, forward_only=True), step(6)]


class Forwards(list[list[str]]):
    """The models whose microbatches each forward computed."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.opened.set()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold all computing inside the block: what arrives there waits together, however slow the machine is."""
        self.opened.clear()
        try:
            yield
        finally:
            self.opened.set()


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> Forwards:
    monkeypatch.setenv("TINSMITH_REFERENCE_SHARED_TOKENS", "1000")
    monkeypatch.setattr(ForwardTimes, "sharing_pays", lambda _: True)
    computed = Forwards()
    advance = ReferenceEngine.advance

    def watched(engine: ReferenceEngine, calls: Sequence[ReferenceCall]) -> None:
        assert computed.opened.wait(AWAIT_SECONDS)
        computed.append([call.work.adapter_id for call in calls])
        advance(engine, calls)

    monkeypatch.setattr(ReferenceEngine, "advance", watched)
    return computed


async def create_all(worker: Worker) -> None:
    """Create the models one after the other. A slow create is charged, and its model has had its part for a while."""
    await worker.submit(*(create(model_id=model_id) for model_id in MODELS))
    for model_id in MODELS:
        await worker.finished(0, model_id)


async def run_all(worker: Worker, held_forwards: Forwards | None = None) -> list[object]:
    """Run the program for each model, all at once or one after the other, and return every result and state."""
    await create_all(worker)
    calls = {model_id: [replace(call, model_id=model_id) for call in PROGRAM] for model_id in MODELS}
    if held_forwards is not None:
        with held_forwards.held():
            await worker.submit(*(call for turn in zip(*calls.values(), strict=True) for call in turn))
    found: list[object] = []
    for model_id in MODELS:
        await worker.submit(*calls[model_id])
        found += [await worker.finished(call.seq_id, model_id) for call in PROGRAM]
        found.append(state_bits(worker.engine.state(model_id)))
    return found


async def test_models_in_a_shared_forward_have_the_results_and_states_of_separate_ones(
    start: StartWorker, tmp_path: Path, forwards: Forwards
) -> None:
    alone = Worker(tmp_path / "alone")
    await alone.service.activate(1)
    one_by_one = await run_all(alone)
    assert all(len(models) == 1 for models in forwards)
    forwards.clear()
    assert await run_all(await start(), held_forwards=forwards) == one_by_one
    assert max(map(len, forwards)) == len(MODELS)
    assert all(len(set(models)) == len(models) for models in forwards), "one microbatch of each at most"
    await alone.service.drain()


async def test_an_unreadable_operation_fails_alone_and_not_the_others_of_its_shared_forward(
    worker: Worker, forwards: Forwards
) -> None:
    await worker.submit(*(create(model_id=model_id) for model_id in MODELS[:3]))
    await worker.submit(train_many(1, 30, MODELS[0]))
    await worker.submit(replace(train(1), model_id=MODELS[1], payload=b"\xff"))
    await worker.submit(replace(train(1, (1, 2, 10_000)), model_id=MODELS[2]))
    assert (await worker.finished(1, MODELS[0])).failure is None
    for model_id in MODELS[1:3]:
        assert (await worker.finished(1, model_id)).failure is not None
    await worker.submit(*(replace(step(2), model_id=model_id) for model_id in MODELS[:3]))
    assert (await worker.finished(2, MODELS[0])).failure is None


async def test_an_error_that_belongs_to_no_call_makes_the_others_start_again(
    worker: Worker, forwards: Forwards, monkeypatch: pytest.MonkeyPatch
) -> None:
    advance, failed = ReferenceEngine.advance, list[str]()

    def failing_in_company(engine: ReferenceEngine, calls: Sequence[ReferenceCall]) -> None:
        advance(engine, calls)
        if len(calls) > 1 and not failed:
            failed.append(calls[0].work.adapter_id)
            raise ValueError("a plugin's mistake")

    monkeypatch.setattr(ReferenceEngine, "advance", failing_in_company)
    await create_all(worker)
    with forwards.held():
        await worker.submit(*(train_many(1, 30, model_id) for model_id in MODELS))
    results = {model_id: await worker.finished(1, model_id) for model_id in MODELS}
    assert failed, "none shared a forward"
    assert [model_id for model_id, result in results.items() if result.failure is not None] == failed
    states = {state_bits(worker.engine.state(model_id)) for model_id in MODELS if model_id not in failed}
    assert len(states) == 1, "the same call on the same adapter: none has a microbatch twice"
