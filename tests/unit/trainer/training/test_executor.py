"""The results of operations, in the SDK's form."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest
from support.engine.reference import ReferenceEngine
from support.worker.messages import forward_backward, next_token_datum
from support.worker.process import Call, create, save, save_ephemeral, step, train
from tinsmith_rpc import wire_pb2, worker_pb2
from tinsmith_trainer.checkpoints.checkpoint_root import CheckpointRoot
from tinsmith_trainer.engines.base import AdamParams, Engine
from tinsmith_trainer.errors import UserError
from tinsmith_trainer.oplog.journal_tables import Operation, OperationResult
from tinsmith_trainer.oplog.model_queue import Entry, ModelQueue
from tinsmith_trainer.training import training_calls
from tinsmith_trainer.training.executor import Executor, save_request
from tinsmith_trainer.training.training_calls import TrainingCalls


class NanEngine(ReferenceEngine):
    """Reports metrics that JSON has no numbers for."""

    def optim_step(self, adapter_id: str, params: AdamParams) -> dict[str, float]:
        return super().optim_step(adapter_id, params) | {"odd": float("nan"), "huge": float("inf")}


class Running(Executor):
    """An executor, and the training calls on its engine."""

    def __init__(self, engine: Engine, checkpoints: CheckpointRoot) -> None:
        super().__init__(engine, checkpoints)
        self.engine = engine
        self.calls = TrainingCalls(engine)


@pytest.fixture
def executor(tmp_path: Path) -> Running:
    return Running(NanEngine(), CheckpointRoot(f"file://{tmp_path}"))


def execute(executor: Running, call: Call) -> OperationResult:
    operation = Operation(call.model_id, call.seq_id, call.kind, zstd=False, accepted_at=0.0)
    if (request := save_request(operation, call.payload)) is not None:
        return executor.write(executor.copy(operation, request, epoch=1, latest_save=0))
    if not operation.is_forward_backward:
        return executor.execute(operation, call.payload)
    begun = executor.calls.begin(ModelQueue(call.model_id, "live"), Entry(operation, "pending"), call.payload)
    while begun.on_engine.next_tokens:
        executor.engine.advance([begun.on_engine])
    return executor.calls.finish(begun)


def test_trap_12_metrics_that_json_cannot_hold_are_texts(executor: Running) -> None:
    for call in (create(), train(1)):
        execute(executor, call)
    metrics = orjson.loads(execute(executor, step(2)).payload or b"")["metrics"]
    assert (metrics["odd"], metrics["huge"]) == ("nan", "inf")
    assert metrics["grad_norm"] > 0


@pytest.mark.parametrize(
    "call",
    [create(), step(1), save(1, "a"), save_ephemeral(1)],
    ids=["create", "optim_step", "save_weights", "save_weights_for_sampler"],
)
def test_trap_13_no_result_has_a_key_called_error(executor: Running, call: Call) -> None:
    """The SDK takes a result with that key for a failure, whatever it holds."""
    if call.seq_id:
        execute(executor, create())
    assert "error" not in orjson.loads(execute(executor, call).payload or b"")


def test_more_logprobs_than_a_journal_holds_are_refused_before_they_are_computed(
    executor: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their result could not be written, in this life of the worker or in any other."""
    execute(executor, create())
    monkeypatch.setattr(training_calls, "MAX_RESULT_BYTES", 4 * 4)
    execute(executor, train(1, (3, 1, 4, 1, 5)))
    with pytest.raises(UserError, match=r"asks for 20 bytes of logprobs.*Send fewer datums in a call"):
        execute(executor, train(2, (3, 1, 4, 1, 5, 9)))


def test_a_kind_from_a_newer_server_is_refused_by_name(executor: Running) -> None:
    operation = Operation("sess:train:0", 1, 99, zstd=False, accepted_at=0.0)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="kind 99"):
        executor.execute(operation, b"")


def test_images_are_refused_by_an_engine_that_does_not_take_them(executor: Running) -> None:
    execute(executor, create())
    seen = next_token_datum([1, 2, 3])
    seen.model_input.append(wire_pb2.Chunk(image=wire_pb2.ImageChunk(data=b"a picture", format="png")))
    call = Call(1, worker_pb2.FORWARD_BACKWARD, forward_backward([next_token_datum([1, 2]), seen]))
    with pytest.raises(UserError, match="Datum 1 has images, and this server trains reference on text alone"):
        execute(executor, call)
