"""The engines of a comparison, and the run of one plan on each engine. Engines have the names of `--engine`."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tinsmith_trainer.engines.base import AdamParams, AdapterState, CallRunner, LoraSpec, LossSpec, Outcome, Work
from tinsmith_trainer.engines.megatron.flags import RankFlags
from tinsmith_trainer.options import KNOWN_ENGINES, WorkerOptions, parse_options
from tinsmith_trainer.parity.compare import Difference, StepRecord, compare
from tinsmith_trainer.parity.plan import (
    CROSS_ENTROPY,
    TARGETS,
    ParityCall,
    ParityPlan,
    ParityStep,
    plan_steps,
    with_noise_around,
)
from tinsmith_trainer.torch_model.base_model import BaseModelInfo

ADAPTER = "parity"
LOSS_METRIC, NORM_METRIC = "loss:sum", "grad_norm"


class Side(CallRunner, Protocol):
    """The methods of an Engine that the parity gate needs."""

    def base_model(self) -> BaseModelInfo: ...

    def create_adapter(self, adapter_id: str, lora: LoraSpec) -> None: ...

    def optim_step(self, adapter_id: str, params: AdamParams) -> dict[str, float]: ...

    def state(self, adapter_id: str) -> AdapterState: ...

    def drop(self, adapter_id: str) -> None: ...


def run(side: Side, plan: ParityPlan) -> list[StepRecord]:
    """Return an engine's results: before the first step, and after each step. Raises TrainerError if a call fails."""
    return list(_records(side, plan))


def _records(side: Side, plan: ParityPlan) -> Iterator[StepRecord]:
    side.create_adapter(ADAPTER, plan.lora)
    yield StepRecord(_weights(side), {}, {})
    for step in plan.steps:
        yield _step(side, step)


def _step(side: Side, step: ParityStep) -> StepRecord:
    logprobs: dict[str, NDArray[np.float32]] = {}
    losses: dict[str, float] = {}
    for call in step.calls:
        outcome = compute(side, Work(ADAPTER, call.datums, call.loss))
        losses[call.loss.name] = outcome.metrics[LOSS_METRIC]
        for index, output in enumerate(outcome.outputs):
            logprobs[f"{call.loss.name}, datum {index}"] = output["logprobs"]
    norm = side.optim_step(ADAPTER, step.adam)[NORM_METRIC]
    return StepRecord(_weights(side), logprobs, losses, norm)


def compute(side: CallRunner, work: Work) -> Outcome:
    """Compute one work alone. Raises TrainerError."""
    call = side.start(work)
    while call.next_tokens:
        side.advance(side.cobatch([call]))
    return side.finish(call)


def _weights(side: Side) -> Mapping[str, NDArray[np.float32]]:
    return dict(side.state(ADAPTER).weights_only().tensors)


def with_sampler_logprobs(side: Side, plan: ParityPlan) -> ParityPlan:
    """Return the plan with new sampler logprobs: the logprobs of the engine's base model, with noise.

    All engines must then use this plan.
    """
    side.create_adapter(ADAPTER, plan.lora)
    steps = [replace(step, calls=[_moved(side, call) for call in step.calls]) for step in plan.steps]
    side.drop(ADAPTER)
    return replace(plan, steps=steps)


def _moved(side: Side, call: ParityCall) -> ParityCall:
    plain = [replace(datum, loss_inputs={TARGETS: datum.loss_inputs[TARGETS]}) for datum in call.datums]
    outcome = compute(side, Work(ADAPTER, plain, LossSpec(CROSS_ENTROPY), forward_only=True))
    return with_noise_around(call, [output["logprobs"] for output in outcome.outputs])


REFERENCE = "peft-reference"
NAMES = (*KNOWN_ENGINES["worker"], REFERENCE)  # these names never refer to factories
# Flags that change the computation or the memory of an engine. The gate sets model, rank and seed for all engines.
SETTABLE = (
    *(name.replace("_", "-") for name in RankFlags.__annotations__),
    *("device", "dtype", "adapter-slots", "max-rank", "max-sequence-length", "map-stable-reinforce", "model-revision"),
    "recompute",
)
# Required flags of a worker that no engine reads.
_WORKER = ("--volume", "none", "--socket", "none", "--checkpoint-root", "file:///none", "--no-sampling")


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """An engine and its flags: `nemo-rl:ranks=2,tensor-parallel=2` is nemo-rl with `--ranks 2 --tensor-parallel 2`."""

    text: str
    name: str
    flags: Sequence[str]


def parse_choice(text: str) -> EngineChoice:
    """Parse the text of an engine choice.

    `flag=true` sets a flag that takes no value, and `flag=false` sets the opposite flag.

    Raises ValueError.
    """
    name, colon, settings = text.rpartition(":")
    if not colon or ("=" not in settings and name not in NAMES):
        return EngineChoice(text, text, ())
    flags = [flag for setting in settings.split(",") for flag in _flags(text, setting)]
    return EngineChoice(text, name, flags)


def _flags(text: str, setting: str) -> list[str]:
    flag, equals, value = setting.strip().partition("=")
    if not (flag and equals and value):
        raise ValueError(f"{text}: {setting!r} is not FLAG=VALUE, such as ranks=2.")
    if flag not in SETTABLE:
        raise ValueError(f"{text}: {flag} cannot be set for a side; allowed are {', '.join(SETTABLE)}.")
    if value in ("true", "false"):
        return [f"--{flag}" if value == "true" else f"--no-{flag}"]
    return [f"--{flag}", value]


def options_of(choice: EngineChoice, *, model: str, rank: int) -> WorkerOptions:
    """Return the options with which a worker would start this engine.

    Raises UsageError for unknown flags, ValueError for an unknown factory.
    """
    _check_factory(choice.name)
    engine = "peft" if choice.name == REFERENCE else choice.name
    return parse_options(["--model", model, *_WORKER, "--max-rank", str(rank), "--engine", engine, *choice.flags])


def _check_factory(name: str) -> None:
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute):
        return
    try:
        getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{name} is not an engine: {error}.") from error


@contextmanager
def opened(choice: EngineChoice, options: WorkerOptions) -> Iterator[Side]:
    """Yield the engine, with the base model in memory until the context ends. Raises TrainerError."""
    from tinsmith_trainer.parity.reference import PeftReference
    from tinsmith_trainer.worker.startup import load_engine

    if choice.name == REFERENCE:
        yield PeftReference(options)
        return
    engine, _ = load_engine(options)
    try:
        yield engine
    finally:
        close = getattr(engine, "close", None)  # only engines whose ranks are processes have `close`
        if close is not None:
            close()


@dataclass(frozen=True, slots=True)
class Compared:
    """The differences between another engine and the first engine."""

    other: EngineChoice
    base: BaseModelInfo
    plan: ParityPlan
    differences: Sequence[Difference]


@dataclass(frozen=True, slots=True)
class _FirstRun:
    base: BaseModelInfo
    plan: ParityPlan
    records: Sequence[StepRecord]


def run_gate(
    choices: Sequence[EngineChoice], options: Sequence[WorkerOptions], *, steps: int, rank: int, seed: int
) -> Iterator[Compared]:
    """Yield the comparison of each further engine with the first engine.

    The first engine decides the vocabulary, the lengths and the sampler logprobs. Raises TrainerError if an engine
    fails.
    """
    first = _run_first(choices[0], options[0], steps=steps, rank=rank, seed=seed)
    for choice, own in zip(choices[1:], options[1:], strict=True):
        records = _run_other(choice, own, first.plan)
        yield Compared(choice, first.base, first.plan, compare(first.records, records))


# This is a separate function, so that no variable holds one engine's base model while another one loads.
def _run_first(choice: EngineChoice, options: WorkerOptions, *, steps: int, rank: int, seed: int) -> _FirstRun:
    with opened(choice, options) as side:
        base = side.base_model()
        drawn = plan_steps(
            steps=steps, rank=rank, seed=seed, vocab_size=base.vocab_size, max_length=base.max_sequence_length
        )
        plan = with_sampler_logprobs(side, drawn)
        return _FirstRun(base, plan, run(side, plan))


def _run_other(choice: EngineChoice, options: WorkerOptions, plan: ParityPlan) -> list[StepRecord]:
    with opened(choice, options) as side:
        return run(side, plan)
