"""Saves leave no snapshot, run outside of the engine, and are never repeated once a client has their result."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.engine.reference import ReferenceEngine
from support.waiting import until
from support.worker.in_process import Worker
from support.worker.process import AWAIT_SECONDS, MODEL, Call, create, save, save_ephemeral, step, train
from tinsmith_rpc import RELEASE_SEQ_ID
from tinsmith_trainer.checkpoints.checkpoint_root import CheckpointRoot, WrittenCheckpoint
from tinsmith_trainer.engines.base import AdapterState
from tinsmith_trainer.errors import ServerError
from tinsmith_trainer.oplog.attempts import Attempts
from tinsmith_trainer.process.in_flight_marker import InFlightMarker, InFlightWork
from tinsmith_trainer.process.in_flight_marker import _decoded as decoded
from tinsmith_trainer.training.residency import ResidencyRules
from tinsmith_trainer.training.saving import MOST_SAVES, Saves

from .conftest import StartWorker
from .test_life import release
from .test_parking import bits
from .test_poorer_starts import crash

OTHER = "sess:train:1"
AT_ONCE = ResidencyRules(idle_seconds=0.0, turn_seconds=0.0, exchange_share=0.0)


def checkpoints(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.core("durability 5")
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


# ---- written outside of the engine


class Gate:
    """Lets saves begin to write, and end when the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened, self._entered, self._lock = threading.Event(), 0, threading.Condition()
        write = CheckpointRoot.write

        def wait(root: CheckpointRoot, *args: Any, **options: Any) -> WrittenCheckpoint:
            with self._lock:
                self._entered += 1
                self._lock.notify_all()
            assert self.opened.wait(AWAIT_SECONDS)
            return write(root, *args, **options)

        monkeypatch.setattr(CheckpointRoot, "write", wait)

    async def entered(self, saves: int = 1) -> None:
        def wait() -> bool:
            with self._lock:
                return self._lock.wait_for(lambda: self._entered >= saves, AWAIT_SECONDS)

        assert await asyncio.to_thread(wait)

    @property
    def count(self) -> int:
        return self._entered


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch)
    yield gate
    gate.opened.set()


def of(model_id: str, *calls: Call) -> list[Call]:
    return [replace(call, model_id=model_id) for call in calls]


async def test_others_train_while_a_save_is_written_and_its_model_waits(worker: Worker, gate: Gate) -> None:
    await worker.submit(create(), train(1), step(2), save(3, "a"), train(4), step(5))
    await gate.entered()
    await worker.submit(*of(OTHER, create(), train(1), step(2)))
    assert (await worker.finished(2, OTHER)).failure is None
    assert await worker.is_pending(3)
    assert await worker.is_pending(4)
    gate.opened.set()
    await worker.finished(5)
    order = [await worker.finished(seq_id) for seq_id in (3, 4, 5)]
    assert all(result.failure is None for result in order)


async def test_two_copies_are_in_memory_at_most_and_the_third_save_comes_after_them(
    worker: Worker, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[str] = []
    state = ReferenceEngine.state
    monkeypatch.setattr(ReferenceEngine, "state", lambda engine, model: copied.append(model) or state(engine, model))
    models = [f"sess:train:{number}" for number in range(4)]
    for model in models:
        await worker.submit(*of(model, create()))
        await worker.finished(0, model)
    copied.clear()
    for model in models:
        await worker.submit(*of(model, save(1, "a")))
    await gate.entered(saves=2)
    await worker.submit(create(model_id="sess:train:9"))
    await worker.finished(0, "sess:train:9")
    assert gate.count == MOST_SAVES
    assert [model for model in copied if model in models] == copied[:MOST_SAVES]
    gate.opened.set()
    for model in models:
        assert (await worker.finished(1, model)).failure is None


async def test_a_stop_finishes_the_running_save_and_leaves_the_waiting_ones(start: StartWorker, gate: Gate) -> None:
    worker = await start()
    await worker.submit(create(), train(1), step(2), save(3, "a"), train(4))
    await gate.entered()
    stopping = asyncio.create_task(start())
    await asyncio.sleep(0)
    gate.opened.set()
    successor = await stopping
    assert (await successor.finished(3)).failure is None
    assert (await successor.finished(4)).failure is None
    assert gate.count == 1
    saved = [event.checkpoint_saved.name for event in await successor.events() if event.HasField("checkpoint_saved")]
    assert saved == ["a"]


@pytest.mark.parametrize("reason", ["", "Its worker was deleted."])
async def test_more_models_than_places_for_saves_are_all_saved_and_released(
    worker: Worker, gate: Gate, reason: str
) -> None:
    models = [f"sess:train:{number}" for number in range(MOST_SAVES + 2)]
    for model in models:
        await worker.submit(create(model_id=model))
        await worker.finished(0, model)
    for model in models:
        await worker.submit(release("autosave", model, reason))
    await gate.entered(saves=MOST_SAVES)
    gate.opened.set()
    for model in models:
        assert (await worker.finished(RELEASE_SEQ_ID, model)).failure is None
    assert gate.count == len(models)


async def test_a_save_at_which_a_process_ended_is_written_by_itself(
    start: StartWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise it would not be known whose the next end is."""
    worker = await start()
    await worker.submit(create())
    await worker.finished(0)
    monkeypatch.setattr(Attempts, "is_suspect", lambda _, work: work.seq_id == 1)
    threads: list[str] = []
    write = CheckpointRoot.write

    def note(root: CheckpointRoot, *args: Any, **options: Any) -> WrittenCheckpoint:
        threads.append(threading.current_thread().name)
        return write(root, *args, **options)

    monkeypatch.setattr(CheckpointRoot, "write", note)
    await worker.submit(save(1, "a"), save(2, "b"))
    await worker.finished(2)
    assert threads == ["engine", "saver"]


# ---- failures outside of the engine


async def test_a_thread_that_cannot_be_had_fails_its_save_alone(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    await worker.submit(create())
    await worker.finished(0)
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "saver":
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        await worker.submit(save(1, "a"))
        assert "can't start new thread" in await worker.failure(1)
    await worker.submit(train(2), step(3), save(4, "a"))
    assert (await worker.finished(4)).failure is None


async def test_a_failed_save_leaves_no_copy(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, without_collector: None
) -> None:
    copies: list[weakref.ref[Any]] = []

    def refuse(_: CheckpointRoot, *args: Any, **_options: Any) -> WrittenCheckpoint:
        [state] = [arg for arg in args if isinstance(arg, AdapterState)]
        copies.extend(weakref.ref(tensor) for tensor in state.tensors.values())
        raise ServerError("the storage refuses")

    monkeypatch.setattr(CheckpointRoot, "write", refuse)
    await worker.submit(create(), train(1), save(2, "a"), train(3))
    assert "refuses" in await worker.failure(2)
    await worker.finished(3)
    assert copies
    assert not [copy for copy in copies if copy() is not None]


@pytest.fixture
def without_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


async def test_a_suspect_operation_runs_without_a_concurrent_save(
    worker: Worker, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the next end would have no cause, and the one after that."""
    await worker.submit(create(), create(model_id=OTHER))
    for model in (MODEL, OTHER):
        await worker.finished(0, model)
    monkeypatch.setattr(Attempts, "is_suspect", lambda _, work: work.model_id == OTHER)
    marked: list[tuple[InFlightWork, ...]] = []
    mark = InFlightMarker._write

    def note(marker: InFlightMarker, content: bytes) -> None:
        if (interruption := decoded(content)) is not None:
            marked.append(interruption.suspects)
        mark(marker, content)

    await worker.submit(save(1, "a"))
    await gate.entered()
    monkeypatch.setattr(InFlightMarker, "_write", note)
    await worker.submit(*of(OTHER, step(1)))
    assert await worker.is_pending(1, OTHER)
    gate.opened.set()
    await worker.finished(1, OTHER)
    assert [works for works in marked if any(work.model_id == OTHER for work in works)] == [
        (InFlightWork("operation", OTHER, 1),)
    ]


async def test_a_save_without_a_place_fetches_no_adapter(start: StartWorker, gate: Gate) -> None:
    worker = await start(slots=2, places=8, residency=AT_ONCE)
    models = [f"sess:train:{number}" for number in range(4)]
    for model in models:
        await worker.submit(*of(model, create(), train(1), step(2)))
        await worker.finished(2, model)
    restored: list[str] = []
    load_state = worker.engine.load_state

    def note(model: str, *args: Any, **options: Any) -> None:
        restored.append(model)
        load_state(model, *args, **options)

    worker.engine.load_state = note  # type: ignore[method-assign]
    for model in models:
        await worker.submit(*of(model, save(3, "a")))
    await gate.entered(saves=2)
    gate.opened.set()
    for model in models:
        assert (await worker.finished(3, model)).failure is None
    assert len(restored) == len(set(restored))


async def test_a_tenant_runs_one_save_while_others_wait(worker: Worker, gate: Gate) -> None:
    """Copies cost few tokens: by turns alone a tenant with many models would have both places for long."""
    mine, other = [f"sess:train:{number}" for number in range(10, 14)], "sess:train:20"
    for model, tenant in (*((model, "mine") for model in mine), (other, "other")):
        await worker.submit(*of(model, create()), tenant=tenant)
        await worker.finished(0, model)
    for model in mine:
        await worker.submit(*of(model, save(1, "a")), tenant="mine")
    await gate.entered(saves=2)  # no other save waited
    await worker.submit(*of(other, save(1, "a")), tenant="other")
    begun: list[str] = []
    copy = Saves._copy
    with pytest.MonkeyPatch.context() as noting:
        noting.setattr(
            Saves, "_copy", lambda saves, queue, *rest: begun.append(queue.owner) or copy(saves, queue, *rest)
        )
        assert await worker.is_pending(1, other)
        gate.opened.set()
        for model in (*mine, other):
            assert (await worker.finished(1, model)).failure is None
    assert begun[:2].count("other") == 1


async def test_a_save_that_failed_when_its_place_came_takes_no_place_from_others(worker: Worker, gate: Gate) -> None:
    mine, other = ["sess:train:10", "sess:train:11"], "sess:train:20"
    for model, tenant in (*((model, "mine") for model in mine), (other, "other")):
        await worker.submit(*of(model, create()), tenant=tenant)
        await worker.finished(0, model)
    gate.opened.set()
    await worker.submit(*of(other, save(1, "a")), tenant="other")
    await worker.finished(1, other)
    gate.opened.clear()
    for model in mine:
        await worker.submit(*of(model, save(1, "a")), tenant="mine")
    await gate.entered(saves=3)
    await worker.submit(*of(other, save(2, "a")), tenant="other")
    assert await worker.is_pending(2, other)
    gate.opened.set()
    assert "exists already" in await worker.failure(2, other)
    for model in mine:
        await worker.finished(1, model)
    gate.opened.clear()
    for model in mine:
        await worker.submit(*of(model, save(2, "b")), tenant="mine")
    await gate.entered(saves=5)


async def test_a_stop_takes_the_other_snapshots_before_the_snapshot_that_waits_for_a_save(
    start: StartWorker, gate: Gate, written: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow root may keep it waiting until the process is killed."""
    worker = await start()
    saving = "sess:train:2"
    for model in (MODEL, OTHER, saving):
        await worker.submit(*of(model, create(), train(1)))
        await worker.finished(1, model)
    await worker.submit(*of(saving, save(2, "a")))
    await gate.entered()
    monkeypatch.setattr(Attempts, "is_suspect", lambda _, work: work.purpose == "snapshot" and work.model_id == MODEL)
    stopping = asyncio.create_task(worker.service.drain())
    await asyncio.to_thread(until, lambda: (OTHER, 1) in written)
    assert (MODEL, 1) not in written
    gate.opened.set()
    await stopping
    assert (MODEL, 1) in written


async def test_a_stop_records_a_written_save_before_it_waits_for_the_next(
    start: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a storage that blocks until the process is killed would take the result of the other save with it."""
    worker = await start()
    opened = {MODEL: threading.Event(), OTHER: threading.Event()}
    entered, write = threading.Semaphore(0), CheckpointRoot.write

    def wait(root: CheckpointRoot, model_id: str, *args: Any, **options: Any) -> WrittenCheckpoint:
        entered.release()
        assert opened[model_id].wait(AWAIT_SECONDS)
        return write(root, model_id, *args, **options)

    monkeypatch.setattr(CheckpointRoot, "write", wait)
    for model in (MODEL, OTHER):
        await worker.submit(*of(model, create(), save(1, "a")))
        assert await asyncio.to_thread(entered.acquire, timeout=AWAIT_SECONDS)
    counters = worker.service.scheduler.counters
    done = counters.operations_done
    stopping = asyncio.create_task(worker.service.drain())
    await asyncio.sleep(0)
    try:
        opened[MODEL].set()
        await asyncio.to_thread(until, lambda: counters.operations_done == done + 1)
        assert not stopping.done()
    finally:
        opened[OTHER].set()
        await stopping
    assert counters.operations_done == done + 2


@pytest.mark.core("durability 5")
async def test_a_save_leaves_no_snapshot(worker: Worker, written: list[tuple[str, int]]) -> None:
    await worker.submit(create(), train(1), step(2), save(3, "a"), save_ephemeral(4))
    await worker.finished(4)
    assert written == [(MODEL, 0)]


async def test_a_save_has_the_adapter_of_its_own_turn(worker: Worker) -> None:
    await worker.submit(create(), train(1), step(2), save(3, "a"), train(4), step(5), save(6, "b"))
    await worker.finished(6)
    saved = [event.checkpoint_saved for event in await worker.events() if event.HasField("checkpoint_saved")]
    root, base = worker.service.parts.checkpoints, worker.engine.base_model()
    first, second = (root.read(event.directory, event.manifest_digest, base).state for event in saved)
    assert (first.optimizer_step, second.optimizer_step) == (1, 2)
    now = bits(worker.engine.state(MODEL))
    assert bits(second) == {name: content for name, content in now.items() if not name.startswith("gradients")}


async def test_an_adapter_keeps_its_slot_while_its_save_is_written(start: StartWorker, gate: Gate) -> None:
    worker = await start(slots=1, places=2, residency=AT_ONCE)
    await worker.submit(create(), train(1), step(2), save(3, "a"))
    await gate.entered()
    await worker.submit(create(model_id=OTHER))
    assert await worker.is_pending(0, OTHER)
    gate.opened.set()
    assert (await worker.finished(3)).failure is None
    assert (await worker.finished(0, OTHER)).failure is None


async def test_a_save_that_hangs_counts_as_running(worker: Worker, gate: Gate) -> None:
    """The operator restarts a worker for it."""
    await worker.submit(create(), save(1, "a"))
    await gate.entered()
    await asyncio.sleep(0.01)
    assert worker.service.scheduler.running_seconds() > 0.01
    gate.opened.set()
    await worker.finished(1)
    assert worker.service.scheduler.running_seconds() == 0
