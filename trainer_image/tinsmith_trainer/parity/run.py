"""One side through a plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tinsmith_trainer.engines.base import AdamParams, AdapterState, Computer, LoraSpec, LossSpec, Outcome, Work
from tinsmith_trainer.parity.compare import StepRecord
from tinsmith_trainer.parity.plan import CROSS_ENTROPY, TARGETS, Call, Plan, Step, around
from tinsmith_trainer.torch_model.base_model import BaseModelInfo

ADAPTER = "parity"
LOSS_METRIC, NORM_METRIC = "loss:sum", "grad_norm"


class Side(Computer, Protocol):
    """As much of an Engine as the gate needs."""

    def base_model(self) -> BaseModelInfo: ...

    def create_adapter(self, adapter_id: str, lora: LoraSpec) -> None: ...

    def optim_step(self, adapter_id: str, params: AdamParams) -> dict[str, float]: ...

    def state(self, adapter_id: str) -> AdapterState: ...

    def drop(self, adapter_id: str) -> None: ...


def run(side: Side, plan: Plan) -> list[StepRecord]:
    """What the side had before the first step and after each. Raises TrainerError of the first call that fails."""
    return list(_records(side, plan))


def _records(side: Side, plan: Plan) -> Iterator[StepRecord]:
    side.create_adapter(ADAPTER, plan.lora)
    yield StepRecord(_weights(side), {}, {})
    for step in plan.steps:
        yield _step(side, step)


def _step(side: Side, step: Step) -> StepRecord:
    logprobs: dict[str, NDArray[np.float32]] = {}
    losses: dict[str, float] = {}
    for call in step.calls:
        outcome = compute(side, Work(ADAPTER, call.datums, call.loss))
        losses[call.loss.name] = outcome.metrics[LOSS_METRIC]
        for index, output in enumerate(outcome.outputs):
            logprobs[f"{call.loss.name}, datum {index}"] = output["logprobs"]
    norm = side.optim_step(ADAPTER, step.adam)[NORM_METRIC]
    return StepRecord(_weights(side), logprobs, losses, norm)


def compute(side: Computer, work: Work) -> Outcome:
    """All of one work by itself. Raises TrainerError."""
    call = side.start(work)
    while call.next_tokens:
        side.advance(side.together([call]))
    return side.finish(call)


def _weights(side: Side) -> Mapping[str, NDArray[np.float32]]:
    return dict(side.state(ADAPTER).weights_only().tensors)


def with_sampler_logprobs(side: Side, plan: Plan) -> Plan:
    """The plan with sampler logprobs around the side's own, as those of a sampler of the base model would be.

    Both sides must then get this plan.
    """
    side.create_adapter(ADAPTER, plan.lora)
    steps = [replace(step, calls=[_moved(side, call) for call in step.calls]) for step in plan.steps]
    side.drop(ADAPTER)
    return replace(plan, steps=steps)


def _moved(side: Side, call: Call) -> Call:
    plain = [replace(datum, loss_inputs={TARGETS: datum.loss_inputs[TARGETS]}) for datum in call.datums]
    outcome = compute(side, Work(ADAPTER, plain, LossSpec(CROSS_ENTROPY), forward_only=True))
    return around(call, [output["logprobs"] for output in outcome.outputs])
