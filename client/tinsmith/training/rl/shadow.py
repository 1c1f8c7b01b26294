"""A second training run on the same data, which never delays the main run."""

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
    """A step of a shadow.

    `step` is the step of the main run that used the same data; `metrics` are the metrics of the shadow.
    """

    step: int
    metrics: Mapping[str, float]


class ShadowClient:
    """A second model that trains on the batches of the main run, with another loss, hyperparameters or base model.

    `training_client` belongs to the shadow. At most `most_steps_waiting` batches wait for the shadow. If so many
    batches wait already, a new batch is skipped and counted in `missed_steps`. After the first failure, the shadow does
    not train any more. `failure` is the error of the shadow, which is also logged as a warning. A cancellation during a
    step counts as a failure. A shadow on the same server uses a share of the machine, but does not change the numbers
    of the main run.
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
        """Queue a batch. Return whether the batch was accepted.

        The method returns immediately, and needs a running event loop.
        """
        if self.failure is not None or len(self._waiting) >= self._most_waiting:
            self.missed_steps += 1
            return False
        self._waiting.append((step, data))
        if self._work is None or self._work.done():
            self._work = asyncio.create_task(self._train())
        return True

    async def finish(self, within_seconds: float) -> None:
        """Wait for the batches in the queue. Batches that take longer are cancelled and counted as missed."""
        if self._work is None:
            return
        done, _ = await asyncio.wait([self._work], timeout=within_seconds)
        if not done:
            logger.warning("shadow %s had %.0f s to finish, and did not", self.name, within_seconds)
            await self.cancel()

    async def cancel(self) -> None:
        """Cancel the batches in the queue, count these batches as missed, and return when no batch is in flight."""
        if self._work is None or self._work.done():
            return
        self._work.cancel()
        await asyncio.wait([self._work])
        self._miss_waiting()

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the newest step and the state of the queue, with names `shadow/<name>/…`."""
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
        """Train on the batches in the queue, one after another.

        A batch leaves the queue when the step on this batch is done.
        """
        while self._waiting:
            step, data = self._waiting[0]
            try:
                self.steps.append(ShadowStep(step, await self._step(data)))
            except asyncio.CancelledError:
                # The server may still process these calls, and their gradient would be part of the next step.
                self._fail(step, ShadowCutOff(step))
                raise
            except Exception as error:
                self._fail(step, error)
                return
            self._waiting.popleft()

    async def _step(self, data: Sequence[tinker.Datum]) -> Mapping[str, float]:
        """Make one step of the shadow.

        The optimizer step waits for the gradient, because no step may follow a failure.
        """
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
