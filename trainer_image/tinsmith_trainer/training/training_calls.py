"""Training calls in progress on the engine: forward_backward, or only forward.

A call is computed one microbatch at a time, and other models have turns between two microbatches. So several calls are
in progress at the same time. Each call holds datums, and a copy of the adapter's gradients.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray
from tinsmith_rpc import CUSTOM_LOSS

from tinsmith_trainer.engines.base import Call, Engine, Outcome, Work
from tinsmith_trainer.errors import UserError
from tinsmith_trainer.oplog.journal_tables import GradientSums, OperationResult
from tinsmith_trainer.oplog.model_queue import Entry, ModelQueue
from tinsmith_trainer.oplog.model_queues import Ready
from tinsmith_trainer.training.fair_shares import Contender
from tinsmith_trainer.wire.codec import ForwardBackward, decode_forward_backward, encode_forward_backward, open_body

MOST_CALLS = 8
"""The limit on calls in progress, for all tenants together.

A tenant without a call may exceed the limit, so that no tenant waits for the end of another tenant's operation. At most
this number of calls can also share a forward.
"""
CO_BATCHED = "co_batched_fb:max"
"""The metric for the most models that shared a forward with the call. tinker-cloud has the same name."""
MAX_RESULT_BYTES = 256 * 1024**2
LOGPROB_BYTES = 4


@dataclass(slots=True, eq=False)
class TrainingCall:
    """A training operation that has begun on the engine and has not ended.

    `seconds` is the time of the call's microbatches so far. `most_models` is the highest number of models in a forward.
    """

    contender: Contender
    entry: Entry
    request: ForwardBackward
    on_engine: Call
    seconds: float = 0.0
    most_models: int = 1

    @property
    def model_id(self) -> str:
        return self.contender.model_id


@dataclass(slots=True)
class LogprobGap:
    """The running mean of |trainer logprob - sampler logprob| over the latest tokens of RL."""

    weight: float = 0.98
    value: float = field(default=float("nan"))

    def observe(self, gaps: NDArray[np.float32]) -> None:
        if gaps.size:
            mean = float(gaps.mean())
            self.value = mean if np.isnan(self.value) else self.weight * self.value + (1 - self.weight) * mean


def sampler_gaps(call: ForwardBackward, outcome: Outcome) -> NDArray[np.float32]:
    """Return |trainer logprob - sampler logprob| of the call's tokens with an advantage, float32 `[tokens]`."""
    if call.loss.name == CUSTOM_LOSS:  # the inputs of a custom loss may have any meaning
        return np.empty(0, np.float32)
    gaps = [
        np.abs(output["logprobs"] - datum.loss_inputs["logprobs"])[datum.loss_inputs["advantages"] != 0]
        for datum, output in zip(call.datums, outcome.outputs, strict=True)
        if "logprobs" in datum.loss_inputs and "advantages" in datum.loss_inputs
    ]
    return np.concatenate(gaps) if gaps else np.empty(0, np.float32)


class TrainingCalls:
    """The calls in progress, at most one for each model. Used by the engine's thread only."""

    def __init__(self, engine: Engine, *, reports_co_batching: bool = False) -> None:
        self.logprob_gap = LogprobGap()
        self._reports_co_batching = reports_co_batching
        self._engine = engine
        self._base_path = engine.base_model().path
        self._calls: dict[str, TrainingCall] = {}

    # ---- one call

    def begin(self, queue: ModelQueue, entry: Entry, payload: bytes) -> TrainingCall:
        """Decode the body, and plan the microbatches. Raises TrainerError."""
        body = open_body(payload, zstd=entry.operation.zstd)
        entry.forward_only = body.forward_only
        request = decode_forward_backward(body)
        _check_result_size(request)
        self._check_images(request)
        work = Work(queue.model_id, request.datums, request.loss, request.forward_only)
        return TrainingCall(Contender(queue.tenant, queue.model_id), entry, request, self._engine.start(work))

    def finish(self, call: TrainingCall) -> OperationResult:
        """Add the gradients of a call after all microbatches of the call are computed. Raises TrainerError."""
        outcome = self._engine.finish(call.on_engine)
        gaps = sampler_gaps(call.request, outcome)
        self.logprob_gap.observe(gaps)
        if self._reports_co_batching and call.most_models > 1:
            outcome = replace(outcome, metrics={**outcome.metrics, CO_BATCHED: float(call.most_models)})
        return OperationResult(
            encode_forward_backward(outcome),
            protobuf=True,
            trained_tokens=outcome.trained_tokens,
            input_tokens=outcome.input_tokens,
            forward_only=call.request.forward_only,
            gradient=None if call.request.forward_only else _gradient_sums(call.request, outcome, gaps),
        )

    def _check_images(self, request: ForwardBackward) -> None:
        if self._engine.capabilities().images:
            return
        for index, datum in enumerate(request.datums):
            if datum.images:
                raise UserError(f"Datum {index} has images, and this server trains {self._base_path} on text alone.")

    # ---- all calls

    def __contains__(self, model_id: object) -> bool:
        return model_id in self._calls

    def take(self, model_id: str) -> TrainingCall | None:
        """Remove and return the model's call.

        The caller must pass the call to `keep` later, otherwise the call is lost.
        """
        return self._calls.pop(model_id, None)

    def find(self, model_id: str) -> TrainingCall | None:
        return self._calls.get(model_id)

    def has_room(self) -> bool:
        """Return whether another call may begin, in addition to the call that was taken out."""
        return len(self._calls) + 1 < MOST_CALLS

    def keep(self, call: TrainingCall) -> None:
        self._calls[call.model_id] = call

    def drop_all(self) -> None:
        """Forget all calls. The operations of these calls are in the journal, and start again."""
        self._calls.clear()

    def keep_only(self, model_ids: Container[str]) -> None:
        """Free the memory of calls of models that cannot continue, such as quarantined models."""
        for model_id in [model_id for model_id in self._calls if model_id not in model_ids]:
            del self._calls[model_id]

    def has_others_than(self, model_id: str) -> bool:
        return any(other != model_id for other in self._calls)

    def contenders(self, ready: Sequence[Ready]) -> list[Contender]:
        """Return the models of `ready` that may have a turn now.

        At least one model is returned if `ready` is not empty.
        """
        found = [(Contender(queue.tenant, queue.model_id), entry.operation) for queue, _, entry in ready]
        return [model for model, operation in found if not operation.is_forward_backward or self._may_run(model)]

    def _may_run(self, contender: Contender) -> bool:
        """Return whether the model's call has begun, or whether another call may begin."""
        if contender.model_id in self._calls or len(self._calls) < MOST_CALLS:
            return True
        return all(call.contender.share != contender.share for call in self._calls.values())


def _gradient_sums(call: ForwardBackward, outcome: Outcome, gaps: NDArray[np.float32]) -> GradientSums:
    """Return what the call adds to the figures of the next step."""
    is_custom = call.loss.name == CUSTOM_LOSS  # its metrics may have any meaning
    loss_terms = len(call.datums) if is_custom else int(outcome.metrics.get("tokens:sum", len(call.datums)))
    gap = float(gaps.sum(dtype=np.float64))
    return GradientSums(outcome.input_tokens, outcome.metrics["loss:sum"], loss_terms, gap, gaps.size)


def _check_result_size(call: ForwardBackward) -> None:
    """Refuse a call before its computation if the journal could not hold the result."""
    targets = [datum.loss_inputs["target_tokens"] for datum in call.datums if "target_tokens" in datum.loss_inputs]
    size = sum(LOGPROB_BYTES * each.size for each in targets)
    if size > MAX_RESULT_BYTES:
        raise UserError(
            f"forward_backward asks for {size} bytes of logprobs, of {len(targets)} datums; one call may ask for "
            f"{MAX_RESULT_BYTES}. Send fewer datums in a call."
        )
