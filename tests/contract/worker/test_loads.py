"""Loads, which run outside of the engine: a slow or hanging root holds up only the models that load from it."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from support.worker.in_process import Worker
from support.worker.process import AWAIT_SECONDS, MODEL, create, save, step, train
from tinsmith_rpc import worker_pb2
from tinsmith_trainer.checkpoints.checkpoint_root import CheckpointRoot, LoadedCheckpoint
from tinsmith_trainer.oplog.attempts import Attempts
from tinsmith_trainer.training import loading

from .conftest import StartWorker
from .test_parking import bits
from .test_saves import of
from .test_storage_outages import load, saved

OTHER = "sess:train:1"


class Gate:
    """Lets reads of checkpoints begin, and end when the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened, self.threads, self._lock = threading.Event(), list[str](), threading.Condition()
        read = CheckpointRoot.read

        def wait(root: CheckpointRoot, *args: Any) -> LoadedCheckpoint:
            with self._lock:
                self.threads.append(threading.current_thread().name)
                self._lock.notify_all()
            assert self.opened.wait(AWAIT_SECONDS)
            return read(root, *args)

        monkeypatch.setattr(CheckpointRoot, "read", wait)

    async def entered(self, reads: int = 1) -> None:
        def wait() -> bool:
            with self._lock:
                return self._lock.wait_for(lambda: len(self.threads) >= reads, AWAIT_SECONDS)

        assert await asyncio.to_thread(wait)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch)
    yield gate
    gate.opened.set()


async def with_a_checkpoint(worker: Worker) -> worker_pb2.CheckpointSaved:
    await worker.submit(create(), train(1), step(2), save(3, "a"), train(4), step(5))
    await worker.finished(5)
    return await saved(worker, "a")


async def test_others_train_while_a_checkpoint_is_read_and_its_model_waits(worker: Worker, gate: Gate) -> None:
    checkpoint = await with_a_checkpoint(worker)
    await worker.submit(load(6, checkpoint), train(7), step(8))
    await gate.entered()
    await worker.submit(*of(OTHER, create(), train(1), step(2)))
    assert (await worker.finished(2, OTHER)).failure is None
    assert await worker.is_pending(6)
    assert await worker.is_pending(7)
    gate.opened.set()
    assert (await worker.finished(8)).failure is None
    assert worker.engine.state(MODEL).optimizer_step == 2
    assert gate.threads == ["loader"]


async def test_loads_of_one_tenant_use_one_place_and_another_tenant_loads_in_parallel(
    worker: Worker, gate: Gate
) -> None:
    checkpoint = await with_a_checkpoint(worker)
    mine = [f"sess:train:{number}" for number in range(10, 14)]
    for model_id in mine:
        await worker.submit(load(0, checkpoint, model_id=model_id), tenant="mine")
    await gate.entered()
    await worker.submit(load(0, checkpoint, model_id=OTHER), tenant="another")
    await gate.entered(reads=2)
    assert len(gate.threads) == loading.MOST_LOADS
    gate.opened.set()
    for model_id in (*mine, OTHER):
        assert (await worker.finished(0, model_id)).failure is None
        assert worker.engine.state(model_id).optimizer_step == 1


async def test_a_read_that_hangs_fails_its_load_with_a_message_and_the_model_continues(
    worker: Worker, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = await with_a_checkpoint(worker)
    before = bits(worker.engine.state(MODEL))
    monkeypatch.setattr(loading, "READ_SECONDS", 0.05)
    await worker.submit(load(6, checkpoint), save(7, "b"))
    assert await worker.failure(6) == (
        f"server: tinker://{MODEL}/weights/a could not be loaded: its checkpoint was not read within 0 s. Send the "
        "request again when the storage answers."
    )
    assert (await worker.finished(7)).failure is None
    assert bits(worker.engine.state(MODEL)) == before
    assert worker.service.scheduler.running_seconds() == 0  # no operator may restart the worker for it


async def test_the_number_of_hanging_reads_is_limited(
    worker: Worker, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = await with_a_checkpoint(worker)
    monkeypatch.setattr(loading, "READ_SECONDS", 0.02)
    monkeypatch.setattr(loading, "MOST_LEFT_BEHIND", 2)
    await worker.submit(load(6, checkpoint), load(7, checkpoint), load(8, checkpoint))
    assert "2 reads have hung" in await worker.failure(8)
    assert len(gate.threads) == 2
    monkeypatch.setattr(loading, "READ_SECONDS", AWAIT_SECONDS)
    gate.opened.set()
    for seq_id in range(9, 1000):
        await worker.submit(load(seq_id, checkpoint))
        if (await worker.finished(seq_id)).failure is None:
            break
    assert worker.engine.state(MODEL).optimizer_step == 1


async def test_a_stop_waits_for_no_read_and_leaves_the_load_to_the_next_process(start: StartWorker, gate: Gate) -> None:
    worker = await start()
    checkpoint = await with_a_checkpoint(worker)
    await worker.submit(load(6, checkpoint), train(7), step(8))
    await gate.entered()
    await worker.service.drain()
    gate.opened.set()
    successor = await start()
    assert (await successor.finished(8)).failure is None
    assert successor.engine.state(MODEL).optimizer_step == 2


async def test_a_load_at_which_a_process_ended_is_read_by_itself(
    worker: Worker, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise it would not be known whose the next end is."""
    checkpoint = await with_a_checkpoint(worker)
    monkeypatch.setattr(Attempts, "is_suspect", lambda _, work: work.seq_id == 6)
    await worker.submit(load(6, checkpoint))
    await gate.entered()
    await worker.submit(create(model_id=OTHER))
    assert await worker.is_pending(0, OTHER)
    gate.opened.set()
    assert (await worker.finished(6)).failure is None
    assert (await worker.finished(0, OTHER)).failure is None


async def test_a_read_that_hangs_holds_up_a_suspect_once_and_not_before_each_microbatch(
    worker: Worker, gate: Gate
) -> None:
    await worker.submit(load(6, await with_a_checkpoint(worker)))
    await gate.entered()
    loads = worker.service.scheduler._loads
    [under_way] = loads._loads.values()
    waits: list[float] = []
    under_way.ended = SimpleNamespace(wait=waits.append, set=lambda: None)  # type: ignore[assignment]
    for begun in (under_way.began_at, under_way.began_at - loading.SUSPECT_WAIT_SECONDS):
        under_way.began_at = begun
        loads.wait()
    first, second = waits
    assert 0 < first <= loading.SUSPECT_WAIT_SECONDS
    assert second == 0


async def test_a_load_of_a_suspect_model_has_a_time_limit_too(
    worker: Worker, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = await with_a_checkpoint(worker)
    monkeypatch.setattr(Attempts, "is_suspect", lambda _, work: work.seq_id == 6)
    monkeypatch.setattr(loading, "READ_SECONDS", 0.05)
    await worker.submit(load(6, checkpoint), save(7, "b"))
    assert "was not read within" in await worker.failure(6)
    assert (await worker.finished(7)).failure is None


async def test_a_finished_read_frees_its_place_before_its_turn(
    start: StartWorker, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "MOST_LOADS", 1)
    monkeypatch.setattr(loading, "KEPT_SECONDS", 0.02)
    worker = await start(slots=2, places=2)
    checkpoint = await with_a_checkpoint(worker)
    first, second = "sess:train:2", "sess:train:3"
    await worker.submit(load(0, checkpoint, model_id=first))
    await gate.entered()
    await worker.submit(create(model_id=second))  # which takes the last place
    await worker.finished(0, second)
    await worker.submit(load(6, checkpoint))
    gate.opened.set()
    assert (await worker.finished(6)).failure is None
    assert await worker.is_pending(0, first)


async def test_a_thread_that_cannot_be_had_fails_its_load_alone(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = await with_a_checkpoint(worker)
    begin = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "loader":
            raise RuntimeError("can't start new thread")
        begin(thread)

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        await worker.submit(load(6, checkpoint))
        assert "can't start new thread" in await worker.failure(6)
    await worker.submit(load(7, checkpoint))
    assert (await worker.finished(7)).failure is None


async def test_the_result_of_a_late_read_is_not_kept_in_memory(
    worker: Worker, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = await with_a_checkpoint(worker)
    monkeypatch.setattr(loading, "READ_SECONDS", 0.02)
    of_other_tests = len(in_memory())
    await worker.submit(load(6, checkpoint))
    assert "was not read within" in await worker.failure(6)
    ended = threading.Event()
    monkeypatch.setattr(loading.Loads, "_end", _then(loading.Loads._end, ended.set))
    gate.opened.set()
    assert await asyncio.to_thread(ended.wait, AWAIT_SECONDS)
    assert len(in_memory()) <= of_other_tests


def in_memory() -> list[LoadedCheckpoint]:
    return [
        one for one in gc.get_objects() if type(one) is LoadedCheckpoint
    ]  # isinstance would ask lazy objects of torch for their class


def _then(call: Callable[..., None], after: Callable[[], None]) -> Callable[..., None]:
    def both(*args: object) -> None:
        call(*args)
        after()

    return both
