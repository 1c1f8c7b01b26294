"""The idleness of a session or pool, and the decision to suspend or delete it.

Idleness is derived from what the pods report, and the spec is never written. The status records when a session or pool
was suspended and which wake request was the last one, so another operator continues from there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from tinsmith_operator.api.conditions import Finding
from tinsmith_operator.api.owner import Owner
from tinsmith_operator.api.reasons import Reason
from tinsmith_operator.api.status import IdleState
from tinsmith_operator.common.actions import Delete, Emit, EventType
from tinsmith_operator.common.diagnosis import found
from tinsmith_operator.common.observed import WorkerReport

LONGEST_THRESHOLD = timedelta(seconds=60)
"""A shorter pause between two requests of a client does not count as idleness, and does not change the status."""

FRESH = timedelta(seconds=10)
"""The largest age of a report that may suspend a session or pool. A request could have arrived after an older one."""

STEADY = timedelta(seconds=2)
"""The difference below which two reports name the same time. Reports are rounded, and their way takes time."""


@dataclass(frozen=True)
class Use:
    """The use of an owner by clients, as all its pods report it.

    - `last_used`: when a client last used a pod, or the time of the report if a pod works.
    - `oldest_report`: the time of the oldest report.
    """

    last_used: datetime
    oldest_report: datetime


def use_of(reports: Sequence[WorkerReport]) -> Use | None:
    """Return the use that these reports describe together, or None without a report."""
    if not reports:
        return None
    last_used = max(report.received_at - timedelta(seconds=report.idle_seconds) for report in reports)
    return Use(last_used, min(report.received_at for report in reports))


def assess_idleness(owner: Owner, use: Use | None, now: datetime) -> IdleState | None:
    """Return the new idle state of the owner, or None if its spec has no idle policy.

    A wake request is carried out once for each new value, whatever the clock of its sender says. The request also
    counts as use, so that a pod that is still stopping cannot suspend its owner again.
    """
    policy, before = owner.spec.idle, owner.status.idle or IdleState()
    if owner.is_paused:
        return owner.status.idle
    if policy is None:
        return None
    request = owner.wake_request or before.wake_request
    whole = now.replace(microsecond=0)
    if _has_new_request(request, before.wake_request):
        return _awake(before, whole).model_copy(update={"since": whole, "wake_request": request})
    if before.suspended_time is not None:
        return before if policy.suspend_after_seconds is not None else _awake(before, whole)
    since = _idle_since(before.since, use, _threshold(owner))
    if since is None and owner.deadline is not None and now >= owner.deadline:
        since = owner.deadline
    state = before.model_copy(update={"since": since})
    if _suspends(owner, state, now) and _is_fresh(use, now):
        return state.model_copy(update={"suspended_time": whole})
    return state


def _has_new_request(request: str | None, before: str | None) -> bool:
    """Return whether a user or an API server has made a request since. The removal of an annotation is no request."""
    return bool(set((request or "").split()) - set((before or "").split()))


def _awake(before: IdleState, now: datetime) -> IdleState:
    """Return the state after a suspension, with the length of the suspension."""
    if before.suspended_time is None:
        return before
    seconds = max(0, round((now - before.suspended_time).total_seconds()))
    return before.model_copy(update={"suspended_time": None, "suspended_seconds": before.suspended_seconds + seconds})


def _suspends(owner: Owner, state: IdleState, now: datetime) -> bool:
    seconds = owner.spec.idle.suspend_after_seconds if owner.spec.idle is not None else None
    return seconds is not None and state.since is not None and now >= state.since + timedelta(seconds=seconds)


def is_due(owner: Owner, now: datetime) -> bool:
    """Return whether the owner has been idle for long enough by its status, so that all its pods must report again."""
    state = owner.status.idle
    if state is None or state.since is None or must_stop(owner, now):
        return False
    return any(now >= moment for moment in idle_moments(owner, state))


def must_stop(owner: Owner, now: datetime) -> bool:
    """Return whether the owner must have no pods, by its status."""
    return stop_reason(owner, owner.status.idle, now) is not None


def report_period_seconds(owner: Owner) -> float | None:
    """Return the longest useful period between two reports, or None if the owner has no idle policy."""
    return _threshold(owner).total_seconds() if owner.spec.idle is not None else None


def idle_moments(owner: Owner, state: IdleState | None) -> tuple[datetime, ...]:
    """Return the times at which the owner is suspended or deleted if no client uses it until then."""
    policy = owner.spec.idle
    deadline = (owner.deadline,) if owner.deadline is not None else ()
    if policy is None or state is None or state.since is None:
        return deadline
    limits = (policy.suspend_after_seconds, policy.delete_after_seconds)
    return (*deadline, *(state.since + timedelta(seconds=limit) for limit in limits if limit is not None))


def delete_idle(owner: Owner, state: IdleState | None, use: Use | None, now: datetime) -> tuple[Emit | Delete, ...]:
    """Return the deletion of an owner that has been idle for `spec.idle.deleteAfterSeconds`."""
    policy = owner.spec.idle
    if policy is None or policy.delete_after_seconds is None or state is None or state.since is None:
        return ()
    if now < state.since + timedelta(seconds=policy.delete_after_seconds):
        return ()
    if stop_reason(owner, state, now) is None and not _is_fresh(use, now):
        return ()
    why = f"No client has used the {owner.NOUN} for {policy.delete_after_seconds} s (spec.idle.deleteAfterSeconds)."
    return (
        Emit(EventType.NORMAL, "DeletedWhileIdle", f"{why} The operator deletes it."),
        Delete(owner.KIND, owner.name, owner.uid, why, resource_version=owner.resource_version),
    )


def stop_reason(owner: Owner, state: IdleState | None, now: datetime) -> Finding | None:
    """Return why the owner must have no pods although its spec asks for them: a passed deadline, or idleness."""
    if owner.deadline is not None and now >= owner.deadline:
        seconds = owner.spec.active_deadline_seconds
        return found(
            Reason.DEADLINE_EXCEEDED, f"The {owner.NOUN} has existed for {seconds} s (spec.activeDeadlineSeconds)."
        )
    if state is not None and state.suspended_time is not None and owner.spec.idle is not None:
        seconds = owner.spec.idle.suspend_after_seconds
        return found(Reason.IDLE, f"No client has used the {owner.NOUN} for {seconds} s. The next request wakes it.")
    return None


def _threshold(owner: Owner) -> timedelta:
    policy = owner.spec.idle
    limits = (policy.suspend_after_seconds, policy.delete_after_seconds) if policy is not None else ()
    shortest = min((limit for limit in limits if limit is not None), default=None)
    return min(LONGEST_THRESHOLD, timedelta(seconds=shortest)) if shortest is not None else LONGEST_THRESHOLD


def _idle_since(before: datetime | None, use: Use | None, threshold: timedelta) -> datetime | None:
    """Return since when the owner is idle, or None while clients use it. Without a report, nothing changes."""
    if use is None:
        return before
    if use.oldest_report - use.last_used < threshold:
        return None if before is None or use.last_used > before else before
    if before is not None and use.last_used < before + STEADY:
        return before
    return use.last_used.replace(microsecond=0)


def _is_fresh(use: Use | None, now: datetime) -> bool:
    return use is not None and abs(now - use.oldest_report) <= FRESH
