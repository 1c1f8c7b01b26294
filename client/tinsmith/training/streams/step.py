"""One optimizer step whose gradients are gathered on the server, a minibatch at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import tinker
from tinker import types
from tinker.lib.chunked_fwdbwd_helpers import combine_fwd_bwd_output_results

from tinsmith.training.errors import MinibatchFailed
from tinsmith.training.streams.rollouts import RolloutGroup

Send: TypeAlias = Callable[[list[tinker.Datum]], Awaitable[types.ForwardBackwardOutput]]
"""Submits a forward and backward pass, in the order of the calls, and returns its future."""


@dataclass(frozen=True, slots=True)
class MinibatchPlan:
    """Of each optimizer step.

    `most_stale_steps`: by how many optimizer steps the weights that sampled a group may be behind those that it
    trains; 0 is on-policy. `minibatches_in_flight`: so many may be under way on the server before the next one waits.
    """

    groups_per_step: int
    groups_per_minibatch: int
    most_stale_steps: int = 0
    minibatches_in_flight: int = 2

    def __post_init__(self) -> None:
        for name in ("groups_per_step", "groups_per_minibatch", "minibatches_in_flight"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 1 or more")
        if self.groups_per_minibatch > self.groups_per_step:
            raise ValueError(
                f"groups_per_minibatch is {self.groups_per_minibatch}, more than the {self.groups_per_step} of "
                "groups_per_step; make it smaller, or the step larger"
            )
        if self.most_stale_steps < 0:
            raise ValueError(f"most_stale_steps is {self.most_stale_steps}; 0 is on-policy, and there is no less")

    def staleness(self, group: RolloutGroup, step: int) -> int:
        """In optimizer steps. Raises ValueError for a group of weights that are not there yet."""
        if group.policy_step > step:
            raise ValueError(
                f"a rollout says that it was sampled after {group.policy_step} steps, and {step} were done; "
                "policy_step counts the optimizer steps before its weights were saved"
            )
        return step - group.policy_step

    def takes(self, group: RolloutGroup, step: int) -> bool:
        """Whether it may train step `step`, which counts from 0. Raises ValueError as `staleness` does."""
        return self.staleness(group, step) <= self.most_stale_steps


@dataclass(frozen=True, slots=True)
class StepReport:
    """What an optimizer step was made of.

    `step` counts from 0. `staleness`: of each group that was trained on, in optimizer steps. `metrics`: of the loss
    over all of its data, reduced as the SDK reduces those of one call, and of the optimizer. `outputs`: what the loss
    returned for each datum, in the order of `data`.
    """

    step: int
    data: Sequence[tinker.Datum]
    outputs: Sequence[types.LossFnOutput]
    metrics: Mapping[str, float]
    staleness: Sequence[int]
    dropped_groups: int
    minibatches: int
    waited_seconds: float
    """For rollouts to come, whatever the server computed meanwhile."""


class StepInProgress:
    """Takes groups until it is full. `send` is called with each minibatch as soon as it is complete."""

    def __init__(self, step: int, plan: MinibatchPlan, send: Send) -> None:
        self.step = step
        self.staleness: list[int] = []
        self.dropped_groups = 0
        self.data: list[tinker.Datum] = []
        self.waited_seconds = 0.0
        self._plan = plan
        self._send = send
        self._minibatch: list[tinker.Datum] = []
        self._groups_of_minibatch = 0
        self._under_way: deque[Awaitable[types.ForwardBackwardOutput]] = deque()
        self._results: list[types.ForwardBackwardOutput] = []

    @property
    def groups(self) -> int:
        """That it was given and took, those without data, too."""
        return len(self.staleness)

    @property
    def is_full(self) -> bool:
        return self.groups == self._plan.groups_per_step

    async def take(self, group: RolloutGroup) -> bool:
        """Whether it did: one that is too old is counted. Waits while as much as may be is under way.

        Raises MinibatchFailed, and ValueError for a group of later weights.
        """
        if not self._plan.takes(group, self.step):
            self.dropped_groups += 1
            return False
        self.staleness.append(self._plan.staleness(group, self.step))
        self._minibatch += group.data
        self._groups_of_minibatch += 1
        if self._groups_of_minibatch == self._plan.groups_per_minibatch or self.is_full:
            await self._submit()
        return True

    async def results(self) -> types.ForwardBackwardOutput:
        """Of all its data, with what was too little for a minibatch. Raises MinibatchFailed."""
        await self._submit()
        while self._under_way:
            await self._settle()
        return combine_fwd_bwd_output_results(self._results)

    def report(self, trained: types.ForwardBackwardOutput, stepped: types.OptimStepResponse) -> StepReport:
        return StepReport(
            step=self.step,
            data=self.data,
            outputs=trained.loss_fn_outputs,
            metrics={**trained.metrics, **(stepped.metrics or {})},
            staleness=self.staleness,
            dropped_groups=self.dropped_groups,
            minibatches=len(self._results),
            waited_seconds=self.waited_seconds,
        )

    async def _submit(self) -> None:
        data, self._minibatch, self._groups_of_minibatch = self._minibatch, [], 0
        if not data:
            return
        while len(self._under_way) >= self._plan.minibatches_in_flight:
            await self._settle()
        self.data += data
        self._under_way.append(self._send(data))

    async def _settle(self) -> None:
        try:
            self._results.append(await self._under_way.popleft())
        except tinker.TinkerError as error:
            raise MinibatchFailed(len(self._results), self.step, error) from error
