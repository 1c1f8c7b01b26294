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
    """A panel with curves: metrics over the steps."""

    title: str
    metrics: Sequence[str]


@dataclass(frozen=True, slots=True)
class RunStart:
    """A run before the first step of this process.

    `counted` describes the data, and `done` is the number of earlier steps.
    """

    steps: int
    done: int
    counted: Mapping[str, Any]


OnStart = Callable[[RunStart], None]


class Objective(ABC):
    """The objective of a run that uses one training client.

    The names of a step's metrics begin with `train/`, and those of an evaluation with `eval/held_out/`.
    """

    panels: Sequence[Panel]

    def __init__(self, client: tinker.TrainingClient, data: Prepared, batches: ShuffledBatches) -> None:
        self.client = client
        self.data = data
        self.batches = batches

    @abstractmethod
    def step(self, number: int, adam: types.AdamParams) -> dict[str, float]:
        """Make the optimizer step `number`, from 0, and return the metrics of the step."""

    @abstractmethod
    def evaluate(self) -> dict[str, float]:
        """Return metrics of the current weights. They are empty if no examples are held out."""

    def state(self) -> dict[str, Any]:
        """Return state for `loop_state`. The step itself is not part of it."""
        return {}


@dataclass(frozen=True, slots=True)
class RunKind(Generic[Config, Example]):
    """A kind of run: how it reads data, and how it begins. `read` raises BadData before any request to a server.

    `begin` receives the state of a resumed run.
    """

    config: type[Config]
    read: Callable[[Config], Examples[Example]]
    begin: Callable[[Config, Examples[Example], Rendering, tinker.TrainingClient, Mapping[str, Any] | None], Objective]


def with_optimizer(trained: Mapping[str, float], stepped: types.OptimStepResponse) -> dict[str, float]:
    """Add those metrics of the optimizer that every server reports, as `optim/…`."""
    reported = stepped.metrics or {}
    return {**trained, **({"optim/grad_norm": reported["grad_norm"]} if "grad_norm" in reported else {})}
