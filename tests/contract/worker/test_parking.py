"""More models than slots: those that are not used wait on the volume, and come back with the same bits."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from support.engine.reference import ReferenceEngine
from support.worker.in_process import Worker
from support.worker.messages import forward_backward, next_token_datum
from support.worker.process import AWAIT_SECONDS, Call, create, save, step, train
from tinsmith_rpc import worker_pb2
from tinsmith_trainer.engines.base import AdapterState
from tinsmith_trainer.engines.base import Call as EngineCall
from tinsmith_trainer.errors import ServerError
from tinsmith_trainer.training import restoring
from tinsmith_trainer.training.residency import ResidencyRules
from tinsmith_trainer.worker.metrics import WorkerName, describe

from .conftest import StartWorker
from .test_poorer_starts import crash, failing_for

AT_ONCE = ResidencyRules(idle_seconds=0.0, turn_seconds=0.0, exchange_share=0.0)
"""Settings under which a model leaves when asked, so that each turn may be an exchange."""
MODELS = tuple(f"sess:train:{number}" for number in range(9))


def of(model_id: str, calls: Iterable[Call]) -> list[Call]:
    return [replace(call, model_id=model_id) for call in calls]


def program(number: int) -> list[Call]:
    """Return a program of two windows, the second with two gradients; models differ."""
    first, second = (number + 1, 2, 3, number + 4), (number + 5, 6, 7)
    return of(
        MODELS[number],
        [create(seed=number), train(1, first), step(2), train(3, second), train(4, first), step(5), save(6, "end")],
    )


def bits(state: AdapterState) -> dict[str, bytes]:
    return {name: tensor.tobytes() for name, tensor in state.tensors.items()} | {
        "step": str(state.optimizer_step).encode()
    }


def in_memory(worker: Worker) -> set[str]:
    return set(worker.engine._adapters)


def statuses(worker: Worker) -> dict[str, worker_pb2.ModelStatus]:
    return {model.model_id: model for model in describe(worker.service, WorkerName()).models}


async def taken_up(worker: Worker) -> None:
    """Wait until all but one of its models are in memory."""
    while sum(model.parked for model in statuses(worker).values()) != 1:
        await asyncio.sleep(0.01)


async def undisturbed(folder: Path, programs: Iterable[list[Call]]) -> dict[str, bytes]:
    """Every result of a worker that has a slot for each, by model and number."""
    worker = Worker(folder / "undisturbed", slots=len(MODELS))
    await worker.service.activate(1)
    results = await run(worker, programs)
    await worker.service.drain()
    return results


async def run(worker: Worker, programs: Iterable[list[Call]]) -> dict[str, bytes]:
    """Operation by operation in turn, so that every model waits for all others in the middle of its windows."""
    columns = list(zip(*programs, strict=True))
    for column in columns:
        await worker.submit(*column)
    return {name: answer for column in columns for call in column for name, answer in [await result_of(worker, call)]}


async def result_of(worker: Worker, call: Call) -> tuple[str, bytes]:
    result = await worker.finished(call.seq_id, call.model_id)
    assert result.failure is None, result.failure
    assert result.payload is not None
    return f"{call.model_id} {call.seq_id}", result.payload


async def done(worker: Worker, *calls: Call) -> None:
    """One after the other, so that the model of the last is the one in memory where there is one slot."""
    for call in calls:
        await worker.submit(call)
        await result_of(worker, call)


@pytest.mark.core("durability 14")
async def test_the_ninth_model_is_created_at_once_and_the_first_continues_in_the_middle_of_its_window(
    start: StartWorker, tmp_path: Path
) -> None:
    programs = [program(number) for number in range(9)]
    expected = await undisturbed(tmp_path, programs)
    worker = await start(slots=8)
    found = {}
    for half in (slice(0, 4), slice(4, None)):
        for each in programs:
            await worker.submit(*each[half])
            found |= dict([await result_of(worker, call) for call in each[half]])
            assert len(in_memory(worker)) <= 8
    assert found == expected
    figures = describe(worker.service, WorkerName()).metrics
    assert figures.adapters_restored >= 1
    assert figures.adapters_evicted == figures.adapters_restored + 1


async def test_models_that_all_have_work_take_turns_in_one_slot_and_no_bit_changes(
    start: StartWorker, tmp_path: Path
) -> None:
    programs = [program(number) for number in range(4)]
    expected = await undisturbed(tmp_path, programs)
    worker = await start(slots=1, residency=AT_ONCE)
    assert await run(worker, programs) == expected
    saved = [event.checkpoint_saved for event in await worker.events() if event.HasField("checkpoint_saved")]
    assert sorted(event.model_id for event in saved) == sorted(MODELS[:4]), "each was saved exactly once"


async def test_an_operation_in_progress_keeps_its_adapter_in_memory_until_it_ends(
    start: StartWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other models want the slot between its microbatches. An engine may hold on to the adapter of a call."""
    body = forward_backward([next_token_datum((number, 2, 3)) for number in range(1, 30)])
    first = of(MODELS[0], [create(seed=1), Call(1, worker_pb2.FORWARD_BACKWARD, body), step(2), save(3, "end")])
    second = of(MODELS[1], [create(seed=2), train(1), step(2), save(3, "end")])
    expected = await undisturbed(tmp_path, [first, second])
    worker = await start(slots=1, residency=AT_ONCE)
    await done(worker, first[0])
    entered, opened = threading.Event(), threading.Event()
    advance, drop = ReferenceEngine.advance, ReferenceEngine.drop
    left: list[int] = []

    def wait(engine: ReferenceEngine, calls: Sequence[EngineCall]) -> None:
        entered.set()
        assert opened.wait(AWAIT_SECONDS)
        advance(engine, calls)
        left.append(calls[0].next_tokens)

    def drop_between_calls(engine: ReferenceEngine, adapter_id: str) -> None:
        assert left[-1] == 0, "its call has microbatches left"
        drop(engine, adapter_id)

    monkeypatch.setattr(ReferenceEngine, "advance", wait)
    monkeypatch.setattr(ReferenceEngine, "drop", drop_between_calls)
    await worker.submit(*first[1:])
    await asyncio.to_thread(entered.wait, AWAIT_SECONDS)
    await worker.submit(*second)
    opened.set()
    assert dict([await result_of(worker, call) for call in (*first, *second)]) == expected


async def test_a_crash_with_more_models_than_slots_is_replayed_to_the_same_bits(
    start: StartWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = [program(number) for number in range(4)]
    expected = await undisturbed(tmp_path, programs)
    worker = await start(slots=2, residency=AT_ONCE)
    await run(worker, [each[:4] for each in programs])
    crash(worker, monkeypatch)
    successor = await start(slots=2, residency=AT_ONCE)
    found = await run(successor, [each[4:] for each in programs])
    for each in programs:
        found |= dict([await result_of(successor, call) for call in each[:4]])
    assert found == expected


async def test_a_start_takes_up_those_used_last_and_leaves_the_rest_parked(start: StartWorker) -> None:
    worker = await start(slots=2)
    await done(worker, *program(0)[:3], *program(1)[:3], *program(2)[:3], program(0)[3])
    successor = await start(slots=2)
    await taken_up(successor)
    assert in_memory(successor) == {MODELS[0], MODELS[2]}
    assert [model for model, status in statuses(successor).items() if status.parked] == [MODELS[1]]


async def test_a_requested_snapshot_and_a_stop_skip_parked_models(start: StartWorker) -> None:
    worker = await start(slots=1, residency=AT_ONCE)
    await done(worker, *program(0)[:2], program(1)[0])
    assert await worker.service.snapshot() > 0
    successor = await start(slots=1)
    await successor.submit(step(2))
    assert (await successor.finished(2)).failure is None


async def test_another_model_is_evicted_if_one_cannot_be_saved(
    start: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = await start(slots=2, residency=AT_ONCE)
    await done(worker, *program(0)[:2], *program(1)[:2])
    monkeypatch.setattr(ReferenceEngine, "state", failing_for(MODELS[0], ReferenceEngine.state))
    await worker.submit(program(2)[0])
    assert (await worker.finished(0, MODELS[2])).failure is None
    assert in_memory(worker) == {MODELS[0], MODELS[2]}
    monkeypatch.undo()
    for number in (0, 1):
        await worker.submit(*of(MODELS[number], [step(2)]))
        assert (await worker.finished(2, MODELS[number])).failure is None


async def test_only_the_parked_model_with_a_damaged_snapshot_waits(start: StartWorker, tmp_path: Path) -> None:
    worker = await start(slots=1, residency=AT_ONCE)
    await done(worker, *program(0)[:3], program(1)[0])
    [snapshot] = (tmp_path / "volume" / "snapshots").glob("sess.train.0.*")
    sound = snapshot.read_bytes()
    snapshot.write_bytes(sound[:-4])
    await worker.submit(train(3), *of(MODELS[1], [train(1), step(2)]))
    assert (await worker.finished(2, MODELS[1])).failure is None
    while not (pending := worker.service.pending(MODELS[0], 3)).paused_capacity:
        assert await worker.is_pending(3)
    assert "is damaged" in pending.reason
    await worker.service.drain()
    snapshot.write_bytes(sound)
    assert (await (await start(slots=1)).finished(3)).failure is None


async def test_a_model_without_memory_waits_and_continues_when_memory_is_free(
    start: StartWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = await undisturbed(tmp_path, [program(0)])
    monkeypatch.setattr(restoring, "MEMORY_RETRY_SECONDS", 0.05)
    worker = await start(slots=1, residency=AT_ONCE)
    await done(worker, *program(0)[:4], program(1)[0])
    with monkeypatch.context() as poor:
        poor.setattr(ReferenceEngine, "load_state", failing_for(MODELS[0], ReferenceEngine.load_state))
        await worker.submit(*program(0)[4:])
        while not (pending := worker.service.pending(MODELS[0], 4)).paused_capacity:
            assert await worker.is_pending(4)
        assert pending.reason.endswith("Nothing is lost: the worker retries every 0 s. Other models continue.")
        await done(worker, *of(MODELS[1], [train(1), step(2)]))
    assert dict([await result_of(worker, call) for call in program(0)]) == expected


async def test_a_model_that_cannot_be_restored_waits_without_loss_while_others_continue(
    start: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = await start(slots=1, residency=AT_ONCE)
    await done(worker, *program(0)[:4], program(1)[0])
    with monkeypatch.context() as poor:
        limit_was_lowered = ServerError("its rank is above the limit")
        failing = failing_for(MODELS[0], ReferenceEngine.load_state, limit_was_lowered)
        poor.setattr(ReferenceEngine, "load_state", failing)
        await worker.submit(train(4), *of(MODELS[1], [train(1), step(2)]))
        assert (await worker.finished(2, MODELS[1])).failure is None
        while not (pending := worker.service.pending(MODELS[0], 4)).paused_capacity:
            assert await worker.is_pending(4)
        assert pending.reason.startswith(f"{MODELS[0]} waits because of an error while its snapshot")
    successor = await start(slots=1)
    await successor.submit(step(5))
    assert (await successor.finished(5)).failure is None
