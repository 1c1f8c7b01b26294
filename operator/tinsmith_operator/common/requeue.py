"""When to reconcile again although no event comes: deadlines, renewals, warnings that are not watched."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta

from tinsmith_operator.common.diagnosis import FRESH_RUN
from tinsmith_operator.common.pod import Pod, overdue_time

LOOK_FOR_WARNINGS = timedelta(seconds=20)
"""While something keeps a session or pool from being ready: warnings are read, not watched."""


def requeue_times_of(pod: Pod) -> Iterable[datetime]:
    if pod.deletion_time is not None:
        yield overdue_time(pod.deletion_time)
    if pod.running_since is not None and pod.latest_ending is not None:
        yield pod.running_since + FRESH_RUN


def requeue_after(moments: Iterable[datetime | None], now: datetime) -> float | None:
    """Of those that lie ahead."""
    ahead = ((moment - now).total_seconds() for moment in moments if moment is not None and moment > now)
    return min(ahead, default=None)
