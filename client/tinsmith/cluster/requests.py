"""What a person can ask of a session or pool: the change to its resource, and the wait until it happened."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from tinsmith.cluster.families import RESTART_REQUEST, SNAPSHOT_REQUEST, Family, Kind
from tinsmith.cluster.health import Health, is_outdated, judge
from tinsmith.cluster.kubectl import ClusterUnreachable, Misused, RequestFailed
from tinsmith.cluster.manifests import Manifest, is_ready, moment, span

SUSPENDED = "Suspended"
"""The reason of a session that has stopped because its spec says so."""

LOOK_SECONDS = 2.0

Outcome = Callable[[Family], str | None]
"""A sentence once it has happened, None before. Raises RequestFailed when it no longer can."""


@dataclass(frozen=True)
class Request:
    """A change of a resource: a merge patch, and a sentence that announces it."""

    patch: Manifest
    announcement: str
    outcome: Outcome


def suspend(family: Family) -> Request:
    """Raises Misused for a pool, which has no volume to come back to."""
    if family.kind is Kind.POOL:
        raise Misused(
            f"{family.title} cannot be suspended; `kubectl scale samplerpool {family.name} --replicas=0` stops its "
            "replicas."
        )
    return Request(
        {"spec": {"suspend": True}},
        f"{family.title} is to take a snapshot and stop",
        lambda now: f"{now.title} is suspended: {judge(now).message}" if is_suspended(now) else None,
    )


def resume(family: Family) -> Request:
    """Raises Misused for a pool."""
    if family.kind is Kind.POOL:
        raise Misused(
            f"{family.title} cannot be resumed; `kubectl scale samplerpool {family.name} --replicas=N` starts replicas."
        )
    return Request({"spec": {"suspend": False}}, f"{family.title} is to start", _ready_again)


def snapshot(family: Family, at: datetime) -> Request:
    """Raises Misused for a pool, and for a session that is suspended: it stopped with a snapshot."""
    if family.kind is Kind.POOL:
        raise Misused(f"{family.title} keeps nothing of its own; only a TrainingSession takes snapshots.")
    _must_run(family, "it took a snapshot when it stopped, and nothing has changed since")
    request, before = written(at), last_snapshot(family)

    def outcome(now: Family) -> str | None:
        """The operator notes which request was answered, and moves the time of the last snapshot if one was taken.

        That time is not compared with the request's: two clocks made them.
        """
        if _answered(now, "snapshot") != request:
            return None
        if last_snapshot(now) == before:
            raise RequestFailed(
                f"The worker of {now.title} refused to take a snapshot; `kubectl tinsmith why "
                f"{now.kind.word}/{now.name}` shows the event that says why."
            )
        return f"{now.title} has a snapshot: every adapter is on its volume, as was asked for at {request}."

    return Request(_annotated(SNAPSHOT_REQUEST, request), f"{family.title} is to take a snapshot", outcome)


def restart(family: Family, at: datetime) -> Request:
    """A session's worker takes a snapshot, stops, and starts on the installation's present image; a pool rolls."""
    _must_run(family, f"`kubectl tinsmith resume {family.name}` starts it, on the installation's present image")
    before = family.pod_uids

    def outcome(now: Family) -> str | None:
        """The status may be a moment behind the pods, so both are looked at."""
        all_new = not (before & now.pod_uids) and sum(map(is_ready, now.pods)) >= _wanted_pods(now)
        return _ready_again(now) if all_new else None

    return Request(_annotated(RESTART_REQUEST, written(at)), f"{family.title} is to restart", outcome)


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
    """The outcome's sentence. name: as the next command takes it.

    Each new reason on the way is told once. A cluster that is away for a while is waited for like everything else.
    Raises RequestFailed when time is over, or when the outcome says that it cannot come any more.
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
                f"It has not happened within {span(timeout_seconds)}. Last seen: {news} The request stands; "
                f"`kubectl tinsmith why {name}` says more."
            )
        sleep(LOOK_SECONDS)


def is_suspended(family: Family) -> bool:
    return judge(family).reason == SUSPENDED and not is_outdated(family)


def last_snapshot(family: Family) -> datetime | None:
    return moment((family.owner.get("status") or {}).get("lastSnapshotTime"))


def written(at: datetime) -> str:
    """As the API writes times, to the second."""
    return at.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _ready_again(family: Family) -> str | None:
    """Raises RequestFailed when a person has to do something first."""
    if is_outdated(family):
        return None
    verdict = judge(family)
    if verdict.health is Health.STUCK:
        raise RequestFailed(f"{family.title} is {verdict.headline}. {verdict.message}")
    return f"{family.title} is ready: {verdict.message}" if verdict.ready else None


def _annotated(annotation: str, request: str) -> Manifest:
    return {"metadata": {"annotations": {annotation: request}}}


def _answered(family: Family, kind: str) -> str | None:
    """The latest request of this kind that has been answered."""
    answered = ((family.owner.get("status") or {}).get("requests") or {}).get(kind)
    return str(answered) if answered is not None else None


def _wanted_pods(family: Family) -> int:
    return int(family.owner["spec"].get("replicas", 1)) if family.kind is Kind.POOL else 1


def _must_run(family: Family, instead: str) -> None:
    if is_suspended(family):
        raise Misused(f"{family.title} is suspended; {instead}.")
