"""Optimizer steps from a stream of rollouts: gradients are computed while more rollouts arrive."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import tinker
from rich.progress import Progress, TaskID
from tinker import types
from tinker.lib.chunked_fwdbwd_helpers import combine_fwd_bwd_output_results
from typing_extensions import override

from tinsmith.training.errors import MinibatchFailed


@dataclass(frozen=True, slots=True)
class RolloutGroup:
    """What one group of an environment came to, ready to train on.

    `policy_step`: how many optimizer steps the weights had had that it was sampled from. Without data, as a group
    whose rewards are all equal, it counts as a group of its step and trains nothing.
    """

    data: Sequence[tinker.Datum]
    policy_step: int


class BufferClosed(Exception):
    """Nobody takes rollouts from here any more."""


class RolloutBuffer(AsyncIterator[RolloutGroup]):
    """Holds `groups` of them at most: whoever samples further ahead waits in `put`. For one event loop."""

    def __init__(self, groups: int) -> None:
        if groups < 1:
            raise ValueError(f"a buffer of {groups} groups holds none; give 1 or more")
        self._most = groups
        self._waiting: deque[RolloutGroup] = deque()
        self._changed = asyncio.Condition()
        self._is_closed = False
        self._error: BaseException | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    async def put(self, group: RolloutGroup) -> None:
        """Returns when there is room. Raises BufferClosed."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._is_closed or len(self._waiting) < self._most)
            if self._is_closed:
                raise BufferClosed("this buffer was closed, so the rollout is not trained on")
            self._waiting.append(group)
            self._changed.notify_all()

    async def close(self, error: BaseException | None = None) -> None:
        """After the last rollout. What waits is still trained on; then iteration ends, or raises `error`."""
        async with self._changed:
            self._is_closed, self._error = True, error
            self._changed.notify_all()

    @override
    async def __anext__(self) -> RolloutGroup:
        async with self._changed:
            await self._changed.wait_for(lambda: self._is_closed or len(self._waiting) > 0)
            if self._waiting:
                group = self._waiting.popleft()
                self._changed.notify_all()
                return group
        raise self._error or StopAsyncIteration


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


async def stream_minibatch_train(
    client: tinker.TrainingClient,
    rollouts: AsyncIterable[RolloutGroup],
    plan: MinibatchPlan,
    adam: types.AdamParams | Callable[[int], types.AdamParams],
    *,
    loss_fn: types.LossFnType = "importance_sampling",
    loss_fn_config: Mapping[str, float | str] | None = None,
    first_step: int = 0,
    progress: Progress | None = None,
) -> AsyncGenerator[StepReport, None]:
    """An optimizer step for every `plan.groups_per_step` groups; yields its report, and goes on when it is asked to.

    Losses are sums over data, so the steps are those of whole batches, to the order in which float32 numbers are
    added. `adam`: of every step, or by the step's number, which counts from `first_step`. Groups that are too old are
    dropped and counted. What is left when `rollouts` ends is a smaller step; a step without any data is none, and the
    next groups have its number.

    Raises MinibatchFailed where the server refuses or fails a minibatch, before the optimizer step. Gradients of the
    step's other minibatches are on the server then, as they are when the caller leaves in the middle of a step: load
    the last saved state before going on. Raises what `rollouts` raises.
    """
    of_step = adam if callable(adam) else lambda _: adam
    send = partial(_send, client, loss_fn, loss_fn_config)
    shown = _Shown(progress, plan)
    current = StepInProgress(first_step, plan, send)
    asked_at = time.monotonic()
    async for group in rollouts:
        current.waited_seconds += time.monotonic() - asked_at
        await current.take(group)
        shown.show(current)
        if current.is_full:
            report = await _finish(client, current, of_step)
            if report is not None:
                yield report
            current = StepInProgress(current.step + (report is not None), plan, send)
        asked_at = time.monotonic()
    if current.groups and (report := await _finish(client, current, of_step)) is not None:
        yield report


def _send(
    client: tinker.TrainingClient,
    loss_fn: types.LossFnType,
    loss_fn_config: Mapping[str, float | str] | None,
    data: list[tinker.Datum],
) -> tinker.APIFuture[types.ForwardBackwardOutput]:
    return client.forward_backward(data, loss_fn, loss_fn_config)


async def _finish(
    client: tinker.TrainingClient, current: StepInProgress, adam: Callable[[int], types.AdamParams]
) -> StepReport | None:
    """None: it had no data.

    The optimizer waits for all results: submitted ahead, it would take a step from what a failed minibatch left.
    """
    trained = await current.results()
    if not current.data:
        return None
    return current.report(trained, await client.optim_step(adam(current.step)))


class _Shown:
    """A bar of the groups of the step that is under way."""

    def __init__(self, progress: Progress | None, plan: MinibatchPlan) -> None:
        self._progress = progress
        self._task: TaskID | None = None
        if progress is not None:
            self._task = progress.add_task("rollouts", total=plan.groups_per_step)

    def show(self, current: StepInProgress) -> None:
        if self._progress is None or self._task is None:
            return
        oldest = max(current.staleness, default=0)
        text = f"step {current.step}, up to {oldest} behind, {current.dropped_groups} dropped"
        self._progress.update(self._task, completed=current.groups, description=text)
