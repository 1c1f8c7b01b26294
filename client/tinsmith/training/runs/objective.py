"""What a kind of run has to say to the loop that all kinds share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import tinker
from tinker import types

from tinsmith.training.runs.config import Config
from tinsmith.training.runs.data import Examples, Prepared, ShuffledBatches
from tinsmith.training.runs.rendering import Rendering

Example = TypeVar("Example")
HELD_OUT = "eval/held_out"


@dataclass(frozen=True, slots=True)
class Panel:
    """One picture of the curves: metrics over steps."""

    title: str
    metrics: Sequence[str]


@dataclass(frozen=True, slots=True)
class RunStart:
    """A run before its first step in this process: `counted` is what the data came to, `done` its steps so far."""

    steps: int
    done: int
    counted: Mapping[str, Any]


OnStart = Callable[[RunStart], None]


class Objective(ABC):
    """On one training client. Metrics of a step begin with `train/`, those of an evaluation with `eval/held_out/`."""

    panels: Sequence[Panel]

    def __init__(self, client: tinker.TrainingClient, data: Prepared, batches: ShuffledBatches) -> None:
        self.client = client
        self.data = data
        self.batches = batches

    @abstractmethod
    def step(self, number: int, adam: types.AdamParams) -> dict[str, float]:
        """Optimizer step `number`, from 0, and what it came to."""

    @abstractmethod
    def evaluate(self) -> dict[str, float]:
        """Of the weights as they are; empty without held-out examples."""

    def state(self) -> dict[str, Any]:
        """Beside the step, for a process that goes on."""
        return {}


@dataclass(frozen=True, slots=True)
class RunKind(Generic[Config, Example]):
    """`read` raises BadData before a server is asked for anything. `begin` is given the state of a run that goes on."""

    config: type[Config]
    read: Callable[[Config], Examples[Example]]
    begin: Callable[[Config, Examples[Example], Rendering, tinker.TrainingClient, Mapping[str, Any] | None], Objective]


def with_optimizer(trained: Mapping[str, float], stepped: types.OptimStepResponse) -> dict[str, float]:
    """What servers say of the optimizer differs; what this one does is logged as `optim/…`."""
    reported = stepped.metrics or {}
    return {**trained, **({"optim/grad_norm": reported["grad_norm"]} if "grad_norm" in reported else {})}
