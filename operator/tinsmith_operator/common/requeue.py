"""Reconciles that no event triggers, for deadlines, renewals and warnings.

This module also makes controllers create refused pods again.

A controller that may not create a pod waits longer after each attempt: up to 17 minutes, or one minute for a Job. A
controller does not notice that a quota was raised or that an admission webhook answers again. After any change of the
workload, the workload's controller tries again immediately. A changed annotation of the workload is enough for a retry.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta

from tinsmith_operator.api.base import format_time, parse_time
from tinsmith_operator.api.conditions import ConditionType, Truth
from tinsmith_operator.api.names import POD_RETRY_ANNOTATION
from tinsmith_operator.api.status import OwnerStatus
from tinsmith_operator.common.actions import Annotate
from tinsmith_operator.common.diagnosis import FRESH_RUN
from tinsmith_operator.common.pod import Pod, overdue_time
from tinsmith_operator.common.workloads import Workload

LOOK_FOR_WARNINGS = timedelta(seconds=20)
"""The interval of reconciles while a session or pool is not ready.

Warnings are read in each of these reconciles, because warnings are not watched.
"""

SHORTEST_PAUSE = timedelta(minutes=1)
LONGEST_PAUSE = timedelta(minutes=5)
"""The longest pause.

With a pause of five minutes, a thousand sessions that wait for a quota send three requests a second.
"""
PAUSES_SO_FAR = 4
"""The divisor for the pause. The pause is the time waited so far, divided by the divisor."""


def requeue_times_of(pod: Pod) -> Iterable[datetime]:
    if pod.deletion_time is not None:
        yield overdue_time(pod.deletion_time)
    if pod.running_since is not None and pod.latest_ending is not None:
        yield pod.running_since + FRESH_RUN


def requeue_after(moments: Iterable[datetime | None], now: datetime) -> float | None:
    """Return the seconds until the earliest of the times that lie in the future."""
    ahead = ((moment - now).total_seconds() for moment in moments if moment is not None and moment > now)
    return min(ahead, default=None)


def annotate_for_retry(workload: Workload, status: OwnerStatus, now: datetime) -> tuple[Annotate, ...]:
    """Annotate a stuck workload if the pause is over, so that the workload's controller creates refused pods again."""
    stalled = status.condition(ConditionType.STALLED)
    if stalled is None or stalled.status != Truth.TRUE:
        return ()
    since = stalled.last_transition_time
    pause = min(LONGEST_PAUSE, max(SHORTEST_PAUSE, (now - since) / PAUSES_SO_FAR))
    if now - max(since, _last_retry_at(workload, now) or since) < pause:
        return ()
    metadata = workload.manifest["metadata"]
    annotations = {POD_RETRY_ANNOTATION: format_time(now)}
    return (Annotate(workload.kind, workload.name, workload.uid, metadata["resourceVersion"], annotations),)


def _last_retry_at(workload: Workload, now: datetime) -> datetime | None:
    """Return the time in the annotation of the latest retry.

    Ignore a text that a user wrote, and a time in the future.
    """
    text = (workload.manifest["metadata"].get("annotations") or {}).get(POD_RETRY_ANNOTATION)
    try:
        moment = parse_time(text)
    except ValueError:
        return None
    return moment if moment is not None and moment.tzinfo is not None and moment <= now else None
