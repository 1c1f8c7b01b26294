"""Optimizer steps from a stream of rollouts: gradients are computed while the rest of a step's rollouts arrive."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Mapping
from functools import partial

import tinker
from rich.progress import Progress, TaskID
from tinker import types

from tinsmith.training.streams.rollouts import RolloutGroup
from tinsmith.training.streams.step import MinibatchPlan, StepInProgress, StepReport


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
        told = f"step {current.step}, up to {oldest} behind, {current.dropped_groups} dropped"
        self._progress.update(self._task, completed=current.groups, description=told)
