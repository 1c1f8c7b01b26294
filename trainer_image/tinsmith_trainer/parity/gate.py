"""Both sides through one plan, one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tinsmith_trainer.engines.base import BaseModelInfo
from tinsmith_trainer.options import WorkerOptions
from tinsmith_trainer.parity.compare import Difference, StepRecord, compare
from tinsmith_trainer.parity.plan import Plan, plan_steps
from tinsmith_trainer.parity.run import run, with_sampler_logprobs
from tinsmith_trainer.parity.sides import EngineChoice, opened


@dataclass(frozen=True, slots=True)
class Compared:
    base: BaseModelInfo
    plan: Plan
    differences: Sequence[Difference]


@dataclass(frozen=True, slots=True)
class _FirstRun:
    base: BaseModelInfo
    plan: Plan
    records: Sequence[StepRecord]


def run_gate(
    choices: Sequence[EngineChoice], options: Sequence[WorkerOptions], *, steps: int, rank: int, seed: int
) -> Compared:
    """The first side decides vocabulary, lengths and sampler logprobs. Raises TrainerError of a side that fails."""
    first = _run_first(choices[0], options[0], steps=steps, rank=rank, seed=seed)
    second = _run_second(choices[1], options[1], first.plan)
    return Compared(first.base, first.plan, compare(first.records, second))


# Functions of their own, so that nothing holds the first side's base model while the second loads.
def _run_first(choice: EngineChoice, options: WorkerOptions, *, steps: int, rank: int, seed: int) -> _FirstRun:
    with opened(choice, options) as side:
        base = side.base_model()
        drawn = plan_steps(
            steps=steps, rank=rank, seed=seed, vocab_size=base.vocab_size, max_length=base.max_sequence_length
        )
        plan = with_sampler_logprobs(side, drawn)
        return _FirstRun(base, plan, run(side, plan))


def _run_second(choice: EngineChoice, options: WorkerOptions, plan: Plan) -> list[StepRecord]:
    with opened(choice, options) as side:
        return run(side, plan)
