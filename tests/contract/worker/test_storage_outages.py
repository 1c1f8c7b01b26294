"""A checkpoint root that is away for a moment: its saves and loads wait, other work continues, and no program ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest
from support.worker.in_process import Worker
from support.worker.process import MODEL, Call, create, save, step, train
from tinsmith_rpc import RELEASE_SEQ_ID, worker_pb2
from tinsmith_trainer.checkpoints.storage import CheckpointStorage
from tinsmith_trainer.training import retries

from .conftest import StartWorker
from .test_life import release

OTHER = "sess:train:1"
RETRY_SECONDS = 0.02


@dataclass
class Outage:
    on: bool = False
    refused: int = 0


@pytest.fixture
def outage(monkeypatch: pytest.MonkeyPatch) -> Iterator[Outage]:
    """Make all files of checkpoints unreadable and unwritable inside the block."""
    outage = Outage()
    monkeypatch.setattr(retries, "STORAGE_RETRY_SECONDS", RETRY_SECONDS)
    for method in ("_read_file_hashed", "_write_file"):
        monkeypatch.setattr(CheckpointStorage, method, _refusing(outage, getattr(CheckpointStorage, method)))
    yield outage
    outage.on = False


def _refusing(outage: Outage, working: Callable[..., object]) -> Callable[..., object]:
    def call(*args: object) -> object:
        if outage.on:
            outage.refused += 1
            raise ConnectionRefusedError("no connection")
        return working(*args)

    return call


async def saved(worker: Worker, name: str) -> worker_pb2.CheckpointSaved:
    events = [event.checkpoint_saved for event in await worker.events() if event.HasField("checkpoint_saved")]
    return next(event for event in events if event.name == name)


def load(seq_id: int, checkpoint: worker_pb2.CheckpointSaved, *, model_id: str = MODEL) -> Call:
    creates = seq_id == 0
    request = worker_pb2.LoadWeights(
        directory=checkpoint.directory,
        manifest_digest=checkpoint.manifest_digest,
        tinker_path=f"tinker://{MODEL}/weights/{checkpoint.name}",
        with_optimizer=True,
        create=creates,
    )
    kind = worker_pb2.LOAD_MODEL if creates else worker_pb2.LOAD_WEIGHTS
    return Call(seq_id, kind, request.SerializeToString(), model_id)


async def refused_twice_more(outage: Outage) -> None:
    before = outage.refused
    while outage.refused < before + 2:
        await asyncio.sleep(RETRY_SECONDS)


async def test_a_save_that_waits_for_storage_holds_back_its_model_only(start: StartWorker, outage: Outage) -> None:
    worker = await start()
    outage.on = True
    await worker.submit(create(), train(1), step(2), save(3, "a"), train(4), step(5))
    await refused_twice_more(outage)
    others = [replace(call, model_id=OTHER) for call in (create(), train(1), step(2))]
    await worker.submit(*others)
    assert (await worker.finished(2, OTHER)).failure is None
    assert await worker.is_pending(3)
    assert await worker.is_pending(4)
    assert "could not be saved" in worker.service.pending(MODEL, 3).reason
    outage.on = False
    assert (await worker.finished(5)).failure is None
    checkpoint = await saved(worker, "a")
    read = worker.service.parts.checkpoints.read(
        checkpoint.directory, checkpoint.manifest_digest, worker.engine.base_model()
    )
    assert (read.state.optimizer_step, worker.engine.state(MODEL).optimizer_step) == (1, 2)


async def test_loads_wait_for_storage_into_models_old_and_new(start: StartWorker, outage: Outage) -> None:
    worker = await start()
    await worker.submit(create(), train(1), step(2), save(3, "a"), train(4), step(5))
    await worker.finished(5)
    checkpoint = await saved(worker, "a")
    outage.on = True
    await worker.submit(load(6, checkpoint), load(0, checkpoint, model_id=OTHER))
    await refused_twice_more(outage)
    assert await worker.is_pending(6)
    assert await worker.is_pending(0, OTHER)
    outage.on = False
    assert (await worker.finished(6)).failure is None
    assert (await worker.finished(0, OTHER)).failure is None
    assert [worker.engine.state(model).optimizer_step for model in (MODEL, OTHER)] == [1, 1]


async def test_a_save_that_waited_too_long_fails_with_a_message_and_the_model_continues(
    start: StartWorker, outage: Outage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retries, "STORAGE_WAIT_SECONDS", 5 * RETRY_SECONDS)
    worker = await start()
    outage.on = True
    await worker.submit(create(), save(1, "a"), train(2), step(3))
    failure = await worker.failure(1)
    assert failure.startswith("server: The checkpoint weights/sess.train.0/1 could not be saved")
    assert failure.endswith("Send the request again when the storage answers.")
    assert (await worker.finished(3)).failure is None
    before = outage.refused
    await worker.submit(save(4, "b"))
    assert "could not be saved" in await worker.failure(4)
    assert outage.refused >= before + 2  # it had a time of its own


async def test_a_worker_that_ends_while_a_save_waits_leaves_it_to_its_successor(
    start: StartWorker, outage: Outage
) -> None:
    worker = await start()
    outage.on = True
    await worker.submit(create(), train(1), step(2), save(3, "a"), train(4), step(5))
    await refused_twice_more(outage)
    successor = await start()
    await refused_twice_more(outage)
    outage.on = False
    assert (await successor.finished(5)).failure is None
    assert (await saved(successor, "a")).seq_id == 3
    assert successor.engine.state(MODEL).optimizer_step == 2


async def test_a_load_that_waited_and_then_lacks_a_slot_does_not_keep_the_worker_busy(
    start: StartWorker, outage: Outage
) -> None:
    worker = await start(slots=2)
    await worker.submit(create(), save(1, "a"))
    await worker.finished(1)
    checkpoint = await saved(worker, "a")
    outage.on = True
    await worker.submit(load(0, checkpoint, model_id=OTHER))
    await refused_twice_more(outage)
    await worker.submit(create(model_id="sess:train:2"))
    await worker.finished(0, "sess:train:2")
    await asyncio.sleep(2 * RETRY_SECONDS)
    used, began = time.process_time(), time.monotonic()
    await asyncio.sleep(2)
    assert time.process_time() - used < 0.5 * (time.monotonic() - began)
    assert await worker.is_pending(0, OTHER)


async def test_a_release_with_a_reason_waits_for_storage_like_any_other(
    start: StartWorker, outage: Outage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retries, "RELEASE_RETRY_SECONDS", RETRY_SECONDS)
    worker = await start()
    await worker.submit(create(), train(1), step(2))
    await worker.finished(2)
    outage.on = True
    await worker.submit(release("autosave", reason="It was deleted."))
    await refused_twice_more(outage)
    outage.on = False
    assert (await worker.finished(RELEASE_SEQ_ID)).failure is None
    assert (await saved(worker, "autosave")).model_id == MODEL
