"""Optimizer steps from a stream of rollouts. Gradients are computed while more rollouts arrive."""

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
    """The training data from one group of rollouts.

    `policy_step` is the number of optimizer steps before the sampling weights were saved. A group may have no data, for
    example because all rewards of the group are equal. A group without data counts as a group of the step, but is not
    trained on.
    """

    data: Sequence[tinker.Datum]
    policy_step: int


class BufferClosed(Exception):
    """An error for a group that arrives after the buffer was closed."""


class RolloutBuffer(AsyncIterator[RolloutGroup]):
    """A queue of at most `groups` rollout groups.

    Use a buffer on only one event loop. While the buffer is full, `put` waits.
    """

    def __init__(self, groups: int) -> None:
        if groups < 1:
            raise ValueError(f"groups is {groups}; it must be 1 or more")
        self._most = groups
        self._waiting: deque[RolloutGroup] = deque()
        self._changed = asyncio.Condition()
        self._is_closed = False
        self._error: BaseException | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    async def put(self, group: RolloutGroup) -> None:
        """Add a group as soon as the buffer has room. Raises BufferClosed."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._is_closed or len(self._waiting) < self._most)
            if self._is_closed:
                raise BufferClosed("the buffer is closed, so the rollout is not trained on")
            self._waiting.append(group)
            self._changed.notify_all()

    async def close(self, error: BaseException | None = None) -> None:
        """Accept no further groups, and end the stream after the groups in the buffer.

        After the last group, the iteration ends, or raises `error`.
        """
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
"""A function that submits a forward-backward pass in the order of calls, and returns the future of the pass."""


@dataclass(frozen=True, slots=True)
class MinibatchPlan:
    """The number of groups and minibatches in each optimizer step, and the limit on staleness.

    `most_stale_steps` is the largest age of a group's sampling weights. The age is the number of optimizer steps
    between the sampling weights and the trained weights; 0 is on-policy. `minibatches_in_flight` is the largest number
    of minibatches on the server at the same time.
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
            raise ValueError(f"most_stale_steps is {self.most_stale_steps}; it must be 0 (on-policy) or more")

    def staleness(self, group: RolloutGroup, step: int) -> int:
        """Return the staleness of the group, in optimizer steps.

        Raises ValueError if the group's weights are of a later step.
        """
        if group.policy_step > step:
            raise ValueError(
                f"a rollout has policy_step {group.policy_step}, but only {step} steps were made; "
                "policy_step counts the optimizer steps before its weights were saved"
            )
        return step - group.policy_step

    def takes(self, group: RolloutGroup, step: int) -> bool:
        """Return whether the group may be used for `step`. Steps count from 0. Raises the errors of `staleness`."""
        return self.staleness(group, step) <= self.most_stale_steps


@dataclass(frozen=True, slots=True)
class StepReport:
    """The result of one optimizer step.

    `step` counts from 0. `staleness` is the staleness in optimizer steps of each group that was trained on. `metrics`
    has the metrics of the loss over all data and the metrics of the optimizer. Metrics of several calls are combined in
    the way in which the SDK combines the metrics of one call. `outputs` has the output of the loss for each datum, in
    the order of `data`.
    """

    step: int
    data: Sequence[tinker.Datum]
    outputs: Sequence[types.LossFnOutput]
    metrics: Mapping[str, float]
    staleness: Sequence[int]
    dropped_groups: int
    minibatches: int
    waited_seconds: float
    """The time spent waiting for rollouts. The time counts even if the server was computing."""


class StepInProgress:
    """A step that collects groups until the step is full. Each complete minibatch is sent at once."""

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
        """Return the number of groups so far, including groups without data."""
        return len(self.staleness)

    @property
    def is_full(self) -> bool:
        return self.groups == self._plan.groups_per_step

    async def take(self, group: RolloutGroup) -> bool:
        """Take a group, and return whether the group was fresh enough. A stale group is dropped and counted.

        If too many minibatches are in flight, wait. Raises MinibatchFailed, and ValueError if the group's weights are
        of a later step.
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
        """Send the last minibatch, which may be incomplete, and return the results for all data.

        Raises MinibatchFailed.
        """
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
    """Make an optimizer step from every `plan.groups_per_step` groups, and yield the report of each step.

    Losses are sums over data. So a step on minibatches equals a step on the whole batch, up to the order of float32
    additions. `adam` is the parameters for every step, or a function that returns the parameters for a step. Steps
    count from `first_step`. Stale groups are dropped and counted. Groups that are left when `rollouts` ends make a
    smaller step. A step without data is skipped, and the next step has the same number.

    Raises MinibatchFailed if the server refuses or fails a minibatch. After a failed minibatch, no optimizer step is
    made. After a failed minibatch, the gradients of the step's other minibatches stay on the server. Gradients also
    stay on the server if the caller stops during a step. After a failed minibatch or a stop, load the last saved state
    before you continue. Raises the errors of `rollouts`.
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
    """Make the optimizer step. For a step without data, return None.

    The optimizer step is submitted after all results. An earlier optimizer step would use an incomplete gradient if a
    minibatch failed.
    """
    trained = await current.results()
    if not current.data:
        return None
    return current.report(trained, await client.optim_step(adam(current.step)))


class _Shown:
    """A progress bar that shows the groups of the current step."""

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
