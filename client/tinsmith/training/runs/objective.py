"""The interface between the training loop and a kind of run."""

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
    """A panel of the curves: metrics over steps."""

    title: str
    metrics: Sequence[str]


@dataclass(frozen=True, slots=True)
class RunStart:
    """A run before this process's first step. `counted` describes the data, `done` counts earlier steps."""

    steps: int
    done: int
    counted: Mapping[str, Any]


OnStart = Callable[[RunStart], None]


class Objective(ABC):
    """The objective of a run on one training client.

    Metrics of a step begin with `train/`, those of an evaluation with `eval/held_out/`.
    """

    panels: Sequence[Panel]

    def __init__(self, client: tinker.TrainingClient, data: Prepared, batches: ShuffledBatches) -> None:
        self.client = client
        self.data = data
        self.batches = batches

    @abstractmethod
    def step(self, number: int, adam: types.AdamParams) -> dict[str, float]:
        """Make optimizer step `number`, from 0, and return its metrics."""

    @abstractmethod
    def evaluate(self) -> dict[str, float]:
        """Return metrics of the current weights; empty without held-out examples."""

    def state(self) -> dict[str, Any]:
        """Return state for `loop_state`, in addition to the step."""
        return {}


@dataclass(frozen=True, slots=True)
class RunKind(Generic[Config, Example]):
    """A kind of run. `read` raises BadData before a server is contacted. `begin` gets the state of a resumed run."""

    config: type[Config]
    read: Callable[[Config], Examples[Example]]
    begin: Callable[[Config, Examples[Example], Rendering, tinker.TrainingClient, Mapping[str, Any] | None], Objective]


def with_optimizer(trained: Mapping[str, float], stepped: types.OptimStepResponse) -> dict[str, float]:
    """Add the optimizer's metrics that every server reports, as `optim/…`."""
    reported = stepped.metrics or {}
    return {**trained, **({"optim/grad_norm": reported["grad_norm"]} if "grad_norm" in reported else {})}
