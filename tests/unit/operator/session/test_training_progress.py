"""The progress in a session's status: what two reports of a worker say, and nothing while the worker is idle."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from tinsmith_operator.api.status import TrainingProgress
from tinsmith_operator.common.observed import ModelStep, WorkerReport
from tinsmith_operator.session.progress import MOST_RUNS, next_progress, stopped_progress

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
LARGEST_BYTES = 3000
"""The largest JSON text of a progress, with the longest IDs that the CRD allows."""


def report(seconds: float = 0, *, idle: float = 0, tokens: int = 0, instance: str = "1", **steps: int) -> WorkerReport:
    return WorkerReport(
        pod_uid="pod",
        received_at=NOON + timedelta(seconds=seconds),
        epoch=1,
        adapters_used=len(steps),
        model_places=64,
        running_seconds=0.0,
        snapshot_seconds=0.0,
        last_snapshot_time=None,
        volume_full=False,
        idle_seconds=idle,
        instance=instance,
        models=tuple(ModelStep(*each) for each in steps.items()),
        trained_tokens=tokens,
    )


def progress_after(reports: Iterable[WorkerReport], earlier: TrainingProgress | None = None) -> list[TrainingProgress]:
    """Return the progress after each report, without the reports that have none."""
    found, before = [], None
    for each in reports:
        earlier, before = next_progress(earlier, before, each), each
        found += [earlier] if earlier is not None else []
    return found


def test_two_reports_show_step_rate_and_last_activity() -> None:
    first = report(0, tokens=1000, a=4, b=9)
    assert progress_after([first, report(60, idle=20, tokens=7000, a=7, b=9)])[-1].to_manifest() == {
        "models": 2,
        "step": 9,
        "tokensPerSecond": 100,
        "lastActivityTime": "2026-03-01T12:00:40Z",
        "runs": [{"model": "b", "step": 9}, {"model": "a", "step": 7}],
    }


def test_a_worker_that_has_not_trained_has_no_progress() -> None:
    idle = [report(60 * minute, idle=60 * minute + 5) for minute in range(3)]
    assert progress_after(idle) == []
    assert progress_after([replace(each, models=(ModelStep("a", 0),)) for each in idle]) == []


def test_the_count_of_a_restarted_worker_begins_at_zero_and_its_start_is_no_activity() -> None:
    trains = [report(0, tokens=0, a=1), report(60, tokens=60_000, a=2)]
    again = progress_after([*trains, report(120, idle=30, instance="2", tokens=6000, a=3)])[-1]
    assert (again.tokens_per_second, again.step) == (100, 3)
    idle = progress_after([*trains, report(120, idle=30, instance="2", tokens=0, a=2)])[-1]
    assert (idle.tokens_per_second, idle.last_activity_time) == (0, NOON + timedelta(seconds=60))


def test_an_activity_without_training_moves_only_the_time() -> None:
    before, after = progress_after([report(0, idle=100, a=3), report(60, idle=20, a=3)])
    assert before == after.model_copy(update={"last_activity_time": NOON - timedelta(seconds=100)})
    assert after.last_activity_time == NOON + timedelta(seconds=40)


def test_of_many_models_those_that_advance_are_named() -> None:
    steps = {f"m{number:02}": 100 + number for number in range(20)}
    later = {**steps, "m03": 104}
    first, second, third = progress_after([report(0, **steps), report(60, **later), report(120, **later)])
    assert [run.model for run in first.runs] == [f"m{number}" for number in range(19, 11, -1)]
    assert [run.model for run in second.runs] == [*(f"m{number}" for number in range(19, 12, -1)), "m03"]
    assert second.runs == third.runs


def test_a_session_without_a_worker_trains_nothing() -> None:
    trains = progress_after([report(0, tokens=0, a=1), report(60, tokens=600, a=2)])[-1]
    assert stopped_progress(trains) == trains.model_copy(update={"tokens_per_second": 0})


@dataclass
class Worker:
    """A worker with models, whose reports are late or early by less than a second."""

    now: float = 0.0
    tokens: int = 0
    used_at: float = 0.0
    starts: int = 1
    steps: dict[str, int] = field(default_factory=dict)

    def report(self, jitter: float, *, idle: bool) -> WorkerReport:
        idle_seconds = max(0.001, self.now - self.used_at) if idle else 0.0
        return report(self.now + jitter, idle=idle_seconds, tokens=self.tokens, instance=str(self.starts), **self.steps)

    def live(self, minute: Minute) -> WorkerReport:
        if minute.restarts:
            self.starts, self.tokens = self.starts + 1, 0
        self.now += minute.seconds
        self.tokens += minute.tokens
        self.used_at = self.now - minute.seconds * minute.idle_share
        for model, steps in minute.steps.items():
            self.steps[model] = self.steps.get(model, 0) + steps
        return self.report(minute.jitter, idle=minute.idle_share > 0)


@dataclass(frozen=True)
class Minute:
    """The time between two reports: what the worker did in it, and the share of it in which the worker then rested."""

    seconds: float
    tokens: int
    steps: dict[str, int]
    idle_share: float
    restarts: bool
    jitter: float


JITTER = st.floats(-0.9, 0.9)
IDS = st.sampled_from([f"{letter}{'x' * 250}" for letter in "abcdefghijkl"])
MINUTES = st.lists(
    st.builds(
        Minute,
        st.floats(3, 90),
        st.integers(0, 10**6),
        st.dictionaries(IDS, st.integers(0, 50), max_size=12),
        st.sampled_from([0.0, 0.01, 0.5, 1.0]),
        st.booleans(),
        JITTER,
    ),
    max_size=8,
)


@given(MINUTES)
def test_the_progress_of_any_history_is_bounded_and_never_runs_backwards(minutes: list[Minute]) -> None:
    worker = Worker()
    shown = progress_after(worker.live(minute) for minute in minutes)
    for progress in shown:
        assert (progress.tokens_per_second or 0) >= 0
        assert len(progress.runs) <= MOST_RUNS
        assert len(json.dumps(progress.to_manifest())) < LARGEST_BYTES
        assert [run.step for run in progress.runs] == sorted((run.step for run in progress.runs), reverse=True)
    for earlier, later in pairwise(shown):
        assert (earlier.step or 0) <= (later.step or 0)
        assert earlier.last_activity_time is not None
        assert later.last_activity_time is not None
        assert earlier.last_activity_time <= later.last_activity_time


@given(MINUTES, st.lists(st.tuples(st.floats(3, 90), JITTER), min_size=2, max_size=8), st.booleans())
def test_an_idle_worker_changes_its_progress_once_at_most(
    minutes: list[Minute], rest: list[tuple[float, float]], is_taken_over: bool
) -> None:
    """The first idle report may end the activity. Each later one shows the same, also to another operator."""
    worker, before = Worker(), None
    progress: TrainingProgress | None = None
    for minute in minutes:
        latest = worker.live(minute)
        progress, before = next_progress(progress, before, latest), latest
    if is_taken_over:
        before = None
        progress = TrainingProgress.model_validate(progress.to_manifest()) if progress is not None else None
    shown = []
    for seconds, jitter in rest:
        worker.now += seconds
        latest = worker.report(jitter, idle=True)
        progress, before = next_progress(progress, before, latest), latest
        shown.append(progress)
    assert shown == shown[:1] * len(shown)
    assert shown[0] is None or shown[0].tokens_per_second == 0
