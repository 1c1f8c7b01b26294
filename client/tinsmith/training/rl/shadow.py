"""Another training run on the same data, beside the one that matters, which never waits for it."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import tinker
from tinker import types

from tinsmith.training.errors import ShadowCutOff

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ShadowStep:
    """`step`: the main run's, whose data it was. `metrics`: of the shadow's loss and optimizer."""

    step: int
    metrics: Mapping[str, float]


class ShadowClient:
    """Trains on every batch that is offered: with another loss, other hyperparameters, or another base model.

    `training_client` is its own. `most_steps_waiting` batches wait for it; while they do, others pass by and are
    counted in `missed_steps`. It fails once: `failure` says what of, it is logged as a warning, and later batches pass
    by; to be cancelled in the middle of a step is a failure too. On one server it takes its share of the machine; the
    other run's numbers stay the same.
    """

    def __init__(
        self,
        name: str,
        training_client: tinker.TrainingClient,
        adam: types.AdamParams | Callable[[int], types.AdamParams],
        *,
        loss_fn: types.LossFnType = "importance_sampling",
        loss_fn_config: Mapping[str, float | str] | None = None,
        most_steps_waiting: int = 4,
    ) -> None:
        if most_steps_waiting < 1:
            raise ValueError(f"most_steps_waiting is {most_steps_waiting}; it must be 1 or more")
        self.name = name
        self.training_client = training_client
        self.steps: list[ShadowStep] = []
        self.missed_steps = 0
        self.failure: Exception | None = None
        self._adam = adam if callable(adam) else lambda _: adam
        self._loss_fn: types.LossFnType = loss_fn
        self._loss_fn_config = loss_fn_config
        self._most_waiting = most_steps_waiting
        self._waiting: deque[tuple[int, Sequence[tinker.Datum]]] = deque()
        self._work: asyncio.Task[None] | None = None

    def offer(self, step: int, data: Sequence[tinker.Datum]) -> bool:
        """Whether it will train on them. Returns at once; for a running event loop."""
        if self.failure is not None or len(self._waiting) >= self._most_waiting:
            self.missed_steps += 1
            return False
        self._waiting.append((step, data))
        if self._work is None or self._work.done():
            self._work = asyncio.create_task(self._train())
        return True

    async def finish(self, within_seconds: float) -> None:
        """Waits for what was offered. What takes longer is cancelled, and counted as missed."""
        if self._work is None:
            return
        done, _ = await asyncio.wait([self._work], timeout=within_seconds)
        if not done:
            logger.warning("shadow %s had %.0f s to finish, and did not", self.name, within_seconds)
            await self.cancel()

    async def cancel(self) -> None:
        """What was offered and is not done counts as missed. Returns when nothing is under way."""
        if self._work is None or self._work.done():
            return
        self._work.cancel()
        await asyncio.wait([self._work])
        self._miss_waiting()

    def metrics(self) -> dict[str, float]:
        """Of its newest step, under `shadow/<name>/…`, and how it keeps up."""
        newest = self.steps[-1].metrics if self.steps else {}
        state = {
            "progress/steps": float(len(self.steps)),
            "progress/steps_waiting": float(len(self._waiting)),
            "progress/steps_missed": float(self.missed_steps),
            "progress/failed": float(self.failure is not None),
        }
        optim = {f"optim/{name}": float(value) for name, value in newest.items()}
        return {f"shadow/{self.name}/{name}": value for name, value in (state | optim).items()}

    async def _train(self) -> None:
        """One batch after another, each out of the queue when it is trained on."""
        while self._waiting:
            step, data = self._waiting[0]
            try:
                self.steps.append(ShadowStep(step, await self._step(data)))
            except asyncio.CancelledError:
                # The calls that were sent are the server's by now: another step would be made of their gradient too.
                self._fail(step, ShadowCutOff(step))
                raise
            except Exception as error:
                self._fail(step, error)
                return
            self._waiting.popleft()

    async def _step(self, data: Sequence[tinker.Datum]) -> Mapping[str, float]:
        """The optimizer waits for the gradient: after a failure there must be no step."""
        trained = await self.training_client.forward_backward(list(data), self._loss_fn, self._loss_fn_config)
        stepped = await self.training_client.optim_step(self._adam(len(self.steps)))
        return {**trained.metrics, **(stepped.metrics or {})}

    def _fail(self, step: int, error: Exception) -> None:
        logger.warning("shadow %s failed at step %d, and trains no more: %s", self.name, step, error)
        self.failure = error
        self._miss_waiting()

    def _miss_waiting(self) -> None:
        self.missed_steps += len(self._waiting)
        self._waiting.clear()
