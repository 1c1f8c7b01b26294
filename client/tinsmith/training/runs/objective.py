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
    """A panel of a figure, with one curve over the steps for each metric."""

    title: str
    metrics: Sequence[str]


@dataclass(frozen=True, slots=True)
class RunStart:
    """A run that this process has read or resumed, but not trained yet.

    `counted` is a description of the data, and `done` is the number of steps of earlier processes.
    """

    steps: int
    done: int
    counted: Mapping[str, Any]


OnStart = Callable[[RunStart], None]


class Objective(ABC):
    """The objective of a run with one training client.

    Metrics of a step have the prefix `train/`, and metrics of an evaluation have the prefix `eval/held_out/`.
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
        """Return evaluation metrics of the current weights. Without held-out examples, return no metrics."""

    def state(self) -> dict[str, Any]:
        """Return the objective's part of `loop_state`. The number of the step is not included."""
        return {}


@dataclass(frozen=True, slots=True)
class RunKind(Generic[Config, Example]):
    """A kind of run, with functions that read the data and begin the run.

    `read` raises BadData before any request to a server.

    `begin` receives the state of a resumed run.
    """

    config: type[Config]
    read: Callable[[Config], Examples[Example]]
    begin: Callable[[Config, Examples[Example], Rendering, tinker.TrainingClient, Mapping[str, Any] | None], Objective]


def with_optimizer(trained: Mapping[str, float], stepped: types.OptimStepResponse) -> dict[str, float]:
    """Add the optimizer metrics that every server reports, with names `optim/…`."""
    reported = stepped.metrics or {}
    return {**trained, **({"optim/grad_norm": reported["grad_norm"]} if "grad_norm" in reported else {})}
