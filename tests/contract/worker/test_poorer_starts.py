"""A start that cannot load what an earlier one acknowledged: the data stays, and other models are served."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.engine.reference import ReferenceCall, ReferenceEngine
from support.worker.in_process import Worker
from support.worker.process import MODEL, Call, broken_train, create, step, train
from tinsmith_rpc import worker_pb2
from tinsmith_trainer.engines.base import Work
from tinsmith_trainer.training import training_calls
from tinsmith_trainer.wire import codec

from .conftest import StartWorker

NO_MEMORY = MemoryError("no memory left")


@pytest.mark.parametrize("verb", ["load_state", "start", "advance", "optim_step"])
async def test_a_model_that_cannot_be_restored_waits_for_the_next_start_while_others_continue(
    verb: str, start: StartWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory may have become less, or a limit was lowered: one bad node must not destroy models."""
    done, other = (create(), train(1), step(2)), "sess:train:1"
    undisturbed, worker = Worker(tmp_path / "undisturbed"), await start()
    await undisturbed.service.activate(1)
    for each in (undisturbed, worker):
        await each.submit(*done, create(model_id=other))
        await each.finished(2)
    crash(worker, monkeypatch)
    with monkeypatch.context() as poor:
        poor.setattr(ReferenceEngine, verb, failing_for(MODEL, getattr(ReferenceEngine, verb)))
        poorer = await start()
        await poorer.submit(train(3), Call(1, worker_pb2.OPTIM_STEP, step(1).payload, other))
        assert (await poorer.finished(1, other)).failure is None
        sentence = rf"{MODEL} waits because of an error while .*: no memory left. Nothing is lost: .*"
        assert re.fullmatch(sentence, await reason_to_wait(poorer, 3))
        assert not [event for event in await poorer.events() if event.HasField("model_corrupted")]
    successor = await start()
    await undisturbed.submit(train(3), step(4))
    await successor.submit(step(4))
    assert await successor.finished(4) == await undisturbed.finished(4)
    found, wanted = (each.engine.state(MODEL).tensors for each in (successor, undisturbed))
    assert {name: tensor.tobytes() for name, tensor in found.items()} == {
        name: tensor.tobytes() for name, tensor in wanted.items()
    }
    await undisturbed.service.drain()


async def reason_to_wait(worker: Worker, seq_id: int) -> str:
    while not (pending := worker.service.pending(MODEL, seq_id)).paused_capacity:
        assert await worker.is_pending(seq_id)
    return pending.reason


def crash(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """End the worker without the snapshots of an orderly stop."""
    monkeypatch.setattr(worker.service.scheduler._model_snapshots, "at_stop", lambda: None)


def failing_for(adapter_id: str, verb: Callable[..., Any], error: Exception = NO_MEMORY) -> Callable[..., Any]:
    def fail(engine: ReferenceEngine, first: Any, *rest: Any, **named: Any) -> Any:
        if _model_of(first) == adapter_id:
            raise error
        return verb(engine, first, *rest, **named)

    return fail


def _model_of(first: str | Work | list[ReferenceCall]) -> str:
    if isinstance(first, str):
        return first
    return first.adapter_id if isinstance(first, Work) else first[0].work.adapter_id


async def test_a_replay_reads_a_gradients_body_once_and_no_other(
    start: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = await start()
    await worker.submit(create(), train(1), train(2, forward_only=True), broken_train(3))
    await worker.finished(3)
    crash(worker, monkeypatch)
    read: list[int] = []

    def counted(body: bytes, *, zstd: bool) -> codec.OpenedBody:
        read.append(len(body))
        return codec.open_body(body, zstd=zstd)

    await worker.service.drain()
    monkeypatch.setattr(training_calls, "open_body", counted)
    successor = await start()
    await successor.recovered()
    assert read == [len(train(1).payload)]
