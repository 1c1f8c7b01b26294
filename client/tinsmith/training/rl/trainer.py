"""`RLTrainer`: reinforcement learning from groups of environments. The trainer samples and trains at the same time."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import tinker
from rich.progress import Progress
from tinker import types
from tinker_cookbook.rl.metric_util import compute_trajectory_metrics
from tinker_cookbook.rl.rollout_strategy import RolloutStrategy
from tinker_cookbook.rl.rollouts import RolloutErrorCounter
from tinker_cookbook.rl.types import EnvGroupBuilder, RLDataset

from tinsmith.training.checkpoints.manager import CheckpointManager, Resumed
from tinsmith.training.errors import NothingToTrainOn
from tinsmith.training.rl.data_order import DataOrder, GroupPosition
from tinsmith.training.rl.pump import RolloutPump
from tinsmith.training.rl.rollouts import EQUAL_REWARDS, AllOrNone, GroupPolicy, RolledOutGroup, roll_out
from tinsmith.training.rl.shadow import ShadowClient
from tinsmith.training.streams import MinibatchPlan, StepReport, stream_minibatch_train

if TYPE_CHECKING:
    from tinker_cookbook.utils.ml_log import Logger  # imports W&B if it is installed


class Tally:
    """Counts of groups and failures. The run ends after `most_fruitless` consecutive groups without data."""

    def __init__(self, most_fruitless: int, in_a_row: Mapping[str, int] | None = None) -> None:
        if most_fruitless < 1:
            raise ValueError(f"most_fruitless_groups is {most_fruitless}; it must be 1 or more")
        self._most_fruitless = most_fruitless
        self._in_a_row: Counter[str] = Counter(in_a_row)
        self._errors = RolloutErrorCounter()
        self._of_step: list[RolledOutGroup] = []

    def add(self, group: RolledOutGroup, step: int) -> None:
        """Count a group. `step` is the number of steps before this group. Raises NothingToTrainOn."""
        self._of_step.append(group)
        if group.fruitless is None:
            self._in_a_row.clear()
        else:
            self._in_a_row[group.fruitless] += 1
        self._errors.ingest(group.trajectories)
        if group.fruitless not in (None, EQUAL_REWARDS):
            self._errors.ingest(None)
        if self._in_a_row.total() >= self._most_fruitless:
            raise NothingToTrainOn(self._in_a_row.total(), self._in_a_row, step)

    def state(self) -> dict[str, int]:
        """Return the number of consecutive groups without data up to now, by reason, for `loop_state`."""
        return dict(self._in_a_row)

    def metrics_of_step(self) -> dict[str, float]:
        """Return the metrics since the previous step: `env/…` of completed groups, and the run's `rollout_errors/…`."""
        groups, self._of_step = self._of_step, []
        ended = [group for group in groups if group.fruitless in (None, EQUAL_REWARDS)]
        rewards = compute_trajectory_metrics(
            [group.trajectories for group in ended], [list(group.tags) for group in ended]
        )
        counts = {
            "progress/groups": float(len(groups)),
            "progress/groups_with_equal_rewards": float(sum(group.fruitless == EQUAL_REWARDS for group in groups)),
            "progress/epoch": float(max((group.place.epoch for group in groups), default=0)),
        }
        return {**rewards, **counts, **self._errors.get_metrics()}


def metrics_of_training(report: StepReport, learning_rate: float, seconds: float) -> Mapping[str, float]:
    """Return the metrics of a step. `seconds` is the time that has passed since the previous step."""
    return {
        **{f"optim/{name}": float(value) for name, value in report.metrics.items()},
        "optim/lr": learning_rate,
        "progress/step": float(report.step),
        "progress/groups_too_stale": float(report.dropped_groups),
        "progress/most_stale_steps": float(max(report.staleness, default=0)),
        "time/step": seconds,
        "time/waiting_for_rollouts": report.waited_seconds,
    }


log = logging.getLogger(__name__)

OnStep: TypeAlias = Callable[[StepReport, tinker.SamplingClient], Awaitable[None]]
"""A function that is called after each step.

The arguments are the report with metrics, and a sampling client of the new weights.
"""
POSITION = "groups"
"""The key in `loop_state` for the position in the data."""
FRUITLESS = "fruitless"
"""The key in `loop_state` for the number of consecutive groups without data.

Because of the number in `loop_state`, a resumed run ends at the same group.
"""
SHADOW_SECONDS = 60.0
"""The time that shadows have to finish after the last step."""


@dataclass(frozen=True, slots=True)
class _Weights:
    """The sampling client for groups, and the number of optimizer steps before its weights were saved."""

    sampling_client: tinker.SamplingClient
    step: int


class RLTrainer:
    """A trainer of `training_client` on groups of environments. The groups are repeated as often as necessary.

    - `plan`: the number of groups in a step, and the limit on staleness. With `most_stale_steps=0` and a `seed`, a run
      can be reproduced bit for bit on a server that computes deterministically, even if it is resumed from a
      checkpoint.
    - `shuffle_seed`: the seed for the order of `groups` in each epoch. Without a `shuffle_seed`, the groups keep their
      order.
    - `adam`: the parameters for every step, or a function that returns the parameters for a step; steps count from 0.
    - `max_tokens`, `temperature`: the sampling parameters of each answer.
    - `groups_in_flight`: the largest number of groups that are sampled at the same time; the default is the largest
      number that the plan can use.
    - `strategy`: a rollout strategy of tinker-cookbook, for example to retry failures. With a strategy, samples have no
      seeds.
    - `most_fruitless_groups`: the run ends after this many consecutive groups without data, because of failures or
      equal rewards. The default is the number of groups in eight steps.
    - `checkpoints`: the manager that saves the run every `save_every` steps and at the end. `resumed` is the result of
      the manager's `resume()`.
    - `shadows`: models that train on the same data.
    - `on_step`: functions that are awaited after each step, in order, while the next groups are sampled.
    """

    def __init__(
        self,
        training_client: tinker.TrainingClient,
        groups: RLDataset | Sequence[EnvGroupBuilder],
        plan: MinibatchPlan,
        adam: types.AdamParams | Callable[[int], types.AdamParams],
        *,
        max_tokens: int,
        temperature: float = 1.0,
        loss_fn: types.LossFnType = "importance_sampling",
        loss_fn_config: Mapping[str, float | str] | None = None,
        seed: int | None = None,
        shuffle_seed: int | None = None,
        groups_in_flight: int | None = None,
        strategy: RolloutStrategy | None = None,
        most_fruitless_groups: int | None = None,
        checkpoints: CheckpointManager | None = None,
        resumed: Resumed | None = None,
        shadows: Sequence[ShadowClient] = (),
        on_step: Sequence[OnStep] = (),
        logger: Logger | None = None,
        progress: Progress | None = None,
    ) -> None:
        if seed is not None and strategy is not None:
            raise ValueError("a strategy samples without seeds: give a seed or a strategy, not both")
        self.training_client = training_client
        self.step = resumed.step if resumed else 0
        self._groups = groups
        self._shuffle_seed = shuffle_seed
        self._order = DataOrder(groups, _position(resumed), shuffle_seed=shuffle_seed)
        self._plan = plan
        self._adam: Callable[[int], types.AdamParams] = adam if callable(adam) else lambda _: adam
        self._loss_fn: types.LossFnType = loss_fn
        self._loss_fn_config = loss_fn_config
        self._max_tokens = max_tokens
        self._temperature = temperature
        self._seed = seed
        self._groups_in_flight = groups_in_flight or (1 + plan.most_stale_steps) * plan.groups_per_step
        self._strategy = strategy or AllOrNone()
        self._tally = Tally(
            8 * plan.groups_per_step if most_fruitless_groups is None else most_fruitless_groups,
            resumed.loop_state.get(FRUITLESS) if resumed else None,
        )
        self._checkpoints = checkpoints
        self._is_saved = True  # nothing to save yet
        self._to_save: dict[str, Any] = {}
        self._shadows = shadows
        self._on_step = on_step
        self._logger = logger
        self._progress = progress

    def train(self, steps: int) -> int:
        """Train like `run`, in a program without an event loop.

        In a notebook, await `run` instead of calling this method.
        """
        return asyncio.run(self.run(steps))

    async def run(self, steps: int) -> int:
        """Train until `steps` optimizer steps are done, including steps before a resume. Return the number of steps.

        The number is smaller if, after at least one step, `most_fruitless_groups` consecutive groups had equal rewards,
        because nothing is left to learn. A run that ends early logs a warning.

        Raises NothingToTrainOn, MinibatchFailed, SaveFailed, the errors of the SDK, and the errors of `on_step`. After
        an error, groups in flight and shadows are cancelled.
        """
        if self.step >= steps:
            return self.step
        self._last_step_at = time.monotonic()
        try:
            await self._train_as_long_as_it_learns(steps)
            await self._save_last()
            for shadow in self._shadows:
                await shadow.finish(SHADOW_SECONDS)
        finally:
            await asyncio.gather(*(shadow.cancel() for shadow in self._shadows))
        return self.step

    async def _train_as_long_as_it_learns(self, steps: int) -> None:
        try:
            await self._train(steps)
        except NothingToTrainOn as error:
            if self.step == 0 or error.causes.keys() != {EQUAL_REWARDS}:
                raise
            log.warning("the run ends after %d of %d steps: %s", self.step, steps, error)

    async def _save_last(self) -> None:
        if self._checkpoints is not None and not self._is_saved:
            await asyncio.to_thread(partial(self._checkpoints.save, self.training_client, self.step, **self._to_save))
            self._is_saved = True

    async def _train(self, steps: int) -> None:
        # Groups that an earlier run left unfinished come first.
        self._order = DataOrder(self._groups, self._order.state(), shuffle_seed=self._shuffle_seed)
        self._weights = await self._saved_weights()
        sampling = RolloutPump(self._order, self._plan, self._roll_out, self._groups_in_flight)
        async with sampling as pump, aclosing(self._steps(pump)) as reports:
            async for report in reports:
                await self._after(report, pump, is_last=report.step + 1 >= steps)
                if self.step >= steps:
                    break

    def _steps(self, pump: RolloutPump) -> AsyncGenerator[StepReport, None]:
        return stream_minibatch_train(
            self.training_client,
            self._taken(pump),
            self._plan,
            self._adam,
            loss_fn=self._loss_fn,
            loss_fn_config=self._loss_fn_config,
            first_step=self.step,
            progress=self._progress,
        )

    async def _taken(self, pump: RolloutPump) -> AsyncIterator[RolledOutGroup]:
        """Yield each group when the step takes or drops the group.

        The number of a step without data is used again for the next step.
        """
        taken, fruitful = 0, False
        async for group in pump.groups:
            assert isinstance(group, RolledOutGroup), "the pump puts no others"
            self._order.finished(group.place)
            self._tally.add(group, self.step)
            if not self._plan.takes(group, self.step):
                await pump.group_dropped()
            else:
                taken, fruitful = taken + 1, fruitful or len(group.data) > 0
                if taken == self._plan.groups_per_step:
                    if not fruitful:
                        await pump.step_done()
                    taken, fruitful = 0, False
            yield group

    async def _roll_out(self, place: GroupPosition, builder: EnvGroupBuilder) -> RolledOutGroup:
        weights = self._weights
        seeds = None if self._seed is None else (self._seed, place.number)
        policy = GroupPolicy(weights.sampling_client, self._max_tokens, self._temperature, seeds=seeds)
        return await roll_out(builder, place, policy, weights.step, self._strategy)

    async def _saved_weights(self) -> _Weights:
        return _Weights(await self.training_client.save_weights_and_get_sampling_client(), self.step)

    async def _after(self, report: StepReport, pump: RolloutPump, *, is_last: bool) -> None:
        self.step = report.step + 1
        state = {POSITION: self._order.state(), FRUITLESS: self._tally.state()}
        for shadow in self._shadows:
            shadow.offer(report.step, report.data)
        self._weights = weights = await self._saved_weights()
        if not is_last:
            await pump.step_done()
        report = replace(report, metrics=self._metrics(report))
        if self._logger is not None:
            self._logger.log_metrics(dict(report.metrics), step=report.step)
        self._to_save = {"loop_state": state, "metrics": report.metrics}
        if self._checkpoints is not None:
            save = partial(self._checkpoints.maybe_save, self.training_client, self.step, **self._to_save)
            self._is_saved = await asyncio.to_thread(save)
        for follow in self._on_step:
            await follow(report, weights.sampling_client)

    def _metrics(self, report: StepReport) -> Mapping[str, float]:
        now = time.monotonic()
        seconds, self._last_step_at = now - self._last_step_at, now
        of_shadows = {name: value for shadow in self._shadows for name, value in shadow.metrics().items()}
        trained = metrics_of_training(report, self._adam(report.step).learning_rate, seconds)
        return {**self._tally.metrics_of_step(), **trained, **of_shadows}


def _position(resumed: Resumed | None) -> Mapping[str, Any] | None:
    """Return the position in the data that the checkpoint contains.

    Raises ValueError if another kind of loop saved the checkpoint.
    """
    if resumed is None:
        return None
    if POSITION not in resumed.loop_state:
        raise ValueError(
            f"the checkpoint of step {resumed.step} is from another loop: its loop_state has no {POSITION!r}"
        )
    position: Mapping[str, Any] = resumed.loop_state[POSITION]
    return position
