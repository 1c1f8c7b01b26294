"""The rule for `status.progress`: from the earlier progress and two consecutive reports to the new progress.

The progress of an idle session stays the same, so an idle session causes no write.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection
from datetime import datetime, timedelta

from tinsmith_operator.api.status import RunProgress, TrainingProgress
from tinsmith_operator.common.idleness import STEADY
from tinsmith_operator.common.observed import ModelStep, WorkerReport

MOST_RUNS = 8
"""The largest number of models that the progress names."""


def next_progress(
    earlier: TrainingProgress | None, before: WorkerReport | None, report: WorkerReport
) -> TrainingProgress | None:
    """Return the progress after the report, or None for a worker that has not trained yet.

    `before` is the previous report of the session's workers, or None for the first report to this operator.
    """
    advanced = _advanced_models(earlier, before, report)
    tokens = _trained_tokens(before, report)
    is_active = bool(report.models) and (bool(advanced) or tokens > 0 or _was_used(earlier, before, report))
    if earlier is None and not is_active and not any(each.step for each in report.models):
        return None
    return TrainingProgress(
        models=len(report.models),
        step=max((each.step for each in report.models), default=None),
        tokens_per_second=_tokens_per_second(earlier, before, report, tokens),
        last_activity_time=_last_activity_time(earlier, report, is_active=is_active),
        runs=_runs(earlier, report.models, advanced),
    )


def stopped_progress(earlier: TrainingProgress) -> TrainingProgress:
    """Return the progress of a session without a worker."""
    return earlier.model_copy(update={"tokens_per_second": 0})


def _advanced_models(
    earlier: TrainingProgress | None, before: WorkerReport | None, report: WorkerReport
) -> frozenset[str]:
    """Return the models with more steps than before. Without an earlier report, the progress knows some steps."""
    known = {run.model: run.step for run in earlier.runs} if earlier is not None else {}
    known |= dict(before.models) if before is not None else {}
    return frozenset(
        model for model, step in report.models if step > known.get(model, 0 if before is not None else step)
    )


def _trained_tokens(before: WorkerReport | None, report: WorkerReport) -> int:
    """Return the tokens trained since the report before. The count of a restarted worker begins at 0."""
    if before is None:
        return 0
    counted = before.trained_tokens if _is_same_process(before, report) else 0
    return max(0, report.trained_tokens - counted)


def _tokens_per_second(
    earlier: TrainingProgress | None, before: WorkerReport | None, report: WorkerReport, tokens: int
) -> int | None:
    seconds = (report.received_at - before.received_at).total_seconds() if before is not None else 0.0
    if seconds > 0:
        return round(tokens / seconds)
    if report.idle_seconds > 0 or not report.models:
        return 0
    return earlier.tokens_per_second if earlier is not None else None


def _was_used(earlier: TrainingProgress | None, before: WorkerReport | None, report: WorkerReport) -> bool:
    """Return whether a client has used the worker since the earlier report. A start of the worker is no use."""
    if report.idle_seconds == 0:
        return True
    if before is not None:
        passed = report.received_at - before.received_at
        return _is_same_process(before, report) and timedelta(seconds=report.idle_seconds) < passed
    return earlier is not None


def _last_activity_time(earlier: TrainingProgress | None, report: WorkerReport, *, is_active: bool) -> datetime | None:
    """Return the time of the last activity in whole seconds.

    Two reports of one activity differ slightly, because they are rounded, and because their way takes time.
    """
    reported = (report.received_at - timedelta(seconds=report.idle_seconds)).replace(microsecond=0)
    known = earlier.last_activity_time if earlier is not None else None
    if known is None:
        return reported
    return reported if is_active and reported > known + STEADY else known


def _runs(
    earlier: TrainingProgress | None, models: Collection[ModelStep], advanced: Collection[str]
) -> tuple[RunProgress, ...]:
    """Return the models that have advanced, then those that were named before, then those with the most steps."""
    named = {run.model for run in earlier.runs} if earlier is not None else set()
    chosen = heapq.nlargest(
        MOST_RUNS, models, key=lambda each: (each.model in advanced, each.model in named, each.step, each.model)
    )
    ordered = sorted(chosen, key=lambda each: (-each.step, each.model))
    return tuple(RunProgress(model=model, step=step) for model, step in ordered)


def _is_same_process(before: WorkerReport, report: WorkerReport) -> bool:
    return (before.pod_uid, before.instance) == (report.pod_uid, report.instance)
