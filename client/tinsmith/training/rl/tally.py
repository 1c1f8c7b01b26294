"""What the groups of a step came to, as metrics under the cookbook's names, and when to give a run up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from tinker_cookbook.rl.metric_util import compute_trajectory_metrics
from tinker_cookbook.rl.rollouts import RolloutErrorCounter

from tinsmith.training.errors import NothingToTrainOn
from tinsmith.training.rl.rollouts import EQUAL_REWARDS, RolledOutGroup
from tinsmith.training.streams.step import StepReport


class Tally:
    """`most_fruitless` groups in a row without data are the end of a run. `in_a_row`: `state()` as it was saved."""

    def __init__(self, most_fruitless: int, in_a_row: Mapping[str, int] | None = None) -> None:
        if most_fruitless < 1:
            raise ValueError(f"most_fruitless_groups is {most_fruitless}; it must be 1 or more")
        self._most_fruitless = most_fruitless
        self._in_a_row: Counter[str] = Counter(in_a_row)
        self._errors = RolloutErrorCounter()
        self._of_step: list[RolledOutGroup] = []

    def add(self, group: RolledOutGroup, step: int) -> None:
        """`step`: how many steps there were before. Raises NothingToTrainOn."""
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
        """For `loop_state`: how many of the row that is going on died of what."""
        return dict(self._in_a_row)

    def metrics_of_step(self) -> dict[str, float]:
        """Of all groups since the last step: `env/…` of those that ended, and `rollout_errors/…` of the run so far."""
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
    """`seconds`: since the step before."""
    return {
        **{f"optim/{name}": float(value) for name, value in report.metrics.items()},
        "optim/lr": learning_rate,
        "progress/step": float(report.step),
        "progress/groups_too_stale": float(report.dropped_groups),
        "progress/most_stale_steps": float(max(report.staleness, default=0)),
        "time/step": seconds,
        "time/waiting_for_rollouts": report.waited_seconds,
    }
