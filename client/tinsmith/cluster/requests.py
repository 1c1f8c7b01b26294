"""Requests that change a session or pool, and the wait until the change is complete."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from tinsmith.cluster.families import RESTART_REQUEST, SNAPSHOT_REQUEST, WAKE_REQUEST, Family, Kind
from tinsmith.cluster.health import Health, is_outdated, judge
from tinsmith.cluster.kubectl import ClusterUnreachable, Misused, RequestFailed
from tinsmith.cluster.manifests import Manifest, is_ready, moment, span

SUSPENDED = "Suspended"
"""The reason in the conditions of a session with `suspend: true` in the spec."""

LOOK_SECONDS = 2.0

Outcome = Callable[[Family], str | None]
"""A function that returns a message when the request is complete.

The function raises RequestFailed if the request cannot complete.
"""


@dataclass(frozen=True)
class Request:
    """A change of a resource: a merge patch, and a sentence that announces the change."""

    patch: Manifest
    announcement: str
    outcome: Outcome


def suspend(family: Family) -> Request:
    """Return a request that stops a session. Raises Misused for a pool, because a pool has no volume."""
    if family.kind is Kind.POOL:
        raise Misused(
            f"{family.title} cannot be suspended; `kubectl scale samplerpool {family.name} --replicas=0` stops its "
            "replicas."
        )
    return Request(
        {"spec": {"suspend": True}},
        f"Requested a snapshot of {family.title}, then a stop",
        lambda now: f"{now.title} is suspended: {judge(now).message}" if is_suspended(now) else None,
    )


def resume(family: Family) -> Request:
    """Return a request that starts a session. Raises Misused for a pool."""
    if family.kind is Kind.POOL:
        raise Misused(
            f"{family.title} cannot be resumed; `kubectl scale samplerpool {family.name} --replicas=N` starts replicas."
        )
    return Request({"spec": {"suspend": False}}, f"Requested the start of {family.title}", _ready_again)


def wake(family: Family, at: datetime) -> Request:
    """Return a request that ends the suspension of an idle session or pool. A running one begins its idle time anew.

    Raises Misused for a session that a user has suspended.
    """
    if is_suspended(family):
        raise Misused(
            f"{family.title} was suspended by a user; `kubectl tinsmith resume {family.name}` starts it again."
        )
    return Request(_annotated(WAKE_REQUEST, written(at)), f"Requested the start of {family.title}", _ready_again)


def snapshot(family: Family, at: datetime) -> Request:
    """Return a request for a snapshot.

    Raises Misused for a pool, and for a suspended session, because a suspended session already has a snapshot.
    """
    if family.kind is Kind.POOL:
        raise Misused(f"{family.title} has no state; only a TrainingSession takes snapshots.")
    _must_run(family, "its last snapshot is complete, because it was taken when the session stopped")
    request, before = written(at), last_snapshot(family)

    def outcome(now: Family) -> str | None:
        """Check the answered request, and the time of the last snapshot.

        The operator always records which request was answered. The operator changes the time of the last snapshot only
        if a snapshot was taken. The times of the snapshot and of the request are not compared, because different clocks
        measured the two times.
        """
        if _answered(now, "snapshot") != request:
            return None
        if last_snapshot(now) == before:
            raise RequestFailed(
                f"The worker of {now.title} refused to take a snapshot; `kubectl tinsmith why "
                f"{now.kind.word}/{now.name}` shows the event with the reason."
            )
        return f"{now.title} has a snapshot: every adapter was written to its volume, as requested at {request}."

    return Request(_annotated(SNAPSHOT_REQUEST, request), f"Requested a snapshot of {family.title}", outcome)


def restart(family: Family, at: datetime) -> Request:
    """Return a request that restarts a session after a snapshot, or a pool one replica after another."""
    _must_run(family, f"`kubectl tinsmith resume {family.name}` starts it with the installation's current image")
    before = family.pod_uids

    def outcome(now: Family) -> str | None:
        """Check the status and the pods, because the status may be out of date."""
        all_new = not (before & now.pod_uids) and sum(map(is_ready, now.pods)) >= _desired_pods(now)
        return _ready_again(now) if all_new else None

    return Request(_annotated(RESTART_REQUEST, written(at)), f"Requested the restart of {family.title}", outcome)


def wait_for(
    look: Callable[[], Family],
    outcome: Outcome,
    *,
    name: str,
    timeout_seconds: float,
    progress: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> str:
    """Wait for the outcome, and return the message about the outcome.

    `name` is the name of the family for the commands that messages suggest.

    Each new reason for the wait is reported once. While the cluster cannot be reached, continue to wait. Raises
    RequestFailed at the timeout, and if the request cannot complete.
    """
    ends_at = clock() + timeout_seconds
    reported = None
    while True:
        try:
            family = look()
        except ClusterUnreachable as error:
            news = str(error)
        else:
            if (sentence := outcome(family)) is not None:
                return sentence
            verdict = judge(family)
            news = f"{verdict.reason}: {verdict.message}"
        if news != reported:
            progress(news)
            reported = news
        if clock() >= ends_at:
            raise RequestFailed(
                f"The request was not completed within {span(timeout_seconds)}. Last seen: {news} It remains in force; "
                f"`kubectl tinsmith why {name}` shows details."
            )
        sleep(LOOK_SECONDS)


def is_suspended(family: Family) -> bool:
    return judge(family).reason == SUSPENDED and not is_outdated(family)


def last_snapshot(family: Family) -> datetime | None:
    return moment((family.owner.get("status") or {}).get("lastSnapshotTime"))


def written(at: datetime) -> str:
    """Return the time in the API's format, to the second."""
    return at.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _ready_again(family: Family) -> str | None:
    """Return a message when the family is ready. Raises RequestFailed if the user must do something first."""
    if is_outdated(family):
        return None
    verdict = judge(family)
    if verdict.health is Health.STUCK:
        raise RequestFailed(f"{family.title} is {verdict.headline}. {verdict.message}")
    return f"{family.title} is ready: {verdict.message}" if verdict.ready else None


def _annotated(annotation: str, request: str) -> Manifest:
    return {"metadata": {"annotations": {annotation: request}}}


def _answered(family: Family, kind: str) -> str | None:
    """Return the latest answered request of this kind."""
    answered = ((family.owner.get("status") or {}).get("requests") or {}).get(kind)
    return str(answered) if answered is not None else None


def _desired_pods(family: Family) -> int:
    return int(family.owner["spec"].get("replicas", 1)) if family.kind is Kind.POOL else 1


def _must_run(family: Family, instead: str) -> None:
    if is_suspended(family):
        raise Misused(f"{family.title} is suspended; {instead}.")
