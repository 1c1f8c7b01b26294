"""Requests that users make by an annotation: a restart or a snapshot.

A request is carried out once for each new time in the annotation.

The pod and the status record which request was carried out. The status also records requests that could not be read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime

from tinsmith_operator.api.base import parse_time
from tinsmith_operator.api.names import RESTART_REQUEST_ANNOTATION, RETIRED_ANNOTATION, SNAPSHOT_REQUEST_ANNOTATION
from tinsmith_operator.api.owner import Owner, Reconciled
from tinsmith_operator.api.status import Requests
from tinsmith_operator.api.training_session import TrainingSession
from tinsmith_operator.common.actions import Emit, EventType
from tinsmith_operator.common.observed import SnapshotAnswer
from tinsmith_operator.common.redaction import quoted
from tinsmith_operator.common.workloads import Workload

LONGEST_REQUEST = 64

RFC_3339 = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,9})?(Z|[+-]\d\d:\d\d)")


def is_time(text: str) -> bool:
    """Return whether the text is a time in RFC 3339, the format that Kubernetes uses."""
    if not RFC_3339.fullmatch(text):
        return False
    try:
        datetime.fromisoformat(re.sub(r"\.\d+", "", text))
    except ValueError:
        return False
    return True


def read_request(annotations: Mapping[str, str], name: str) -> str | None:
    """Return the time in the annotation, or None if the annotation is missing or unreadable."""
    text = annotations.get(name)
    return text if text is not None and is_time(text) else None


def retired_at(owner: Reconciled) -> datetime | None:
    """Return since when the session takes no new models, or None if it is not retired."""
    return parse_time(read_request(owner.annotations, RETIRED_ANNOTATION))


def restart_request(owner: Owner, workload: Workload | None) -> str | None:
    """Return the latest restart request.

    If a user removes the annotation, return the last request, because a removal requests no restart.
    """
    request = read_request(owner.annotations, RESTART_REQUEST_ANNOTATION)
    if request is not None or workload is None:
        return request
    noted = workload.template["metadata"].get("annotations") or {}
    return noted.get(RESTART_REQUEST_ANNOTATION)


def snapshot_request(session: TrainingSession) -> str | None:
    """Return the snapshot request, or None if a worker has answered the request."""
    request = read_request(session.annotations, SNAPSHOT_REQUEST_ANNOTATION)
    answered = session.status.requests.snapshot if session.status.requests is not None else None
    return request if request != answered else None


def answered_requests(
    session: TrainingSession, running_for: str | None, snapshot: SnapshotAnswer | None
) -> Requests | None:
    """Return the completed requests, or None if no request was ever made.

    `running_for` is the restart request that the present pod carried out.
    """
    before = session.status.requests or Requests()
    requested_snapshot = _shortened_request(session, SNAPSHOT_REQUEST_ANNOTATION)
    is_answered = snapshot is not None and snapshot.request == requested_snapshot
    after = Requests(
        restart=answered_restart(session, before.restart, running_for),
        snapshot=requested_snapshot if _is_done(requested_snapshot, is_answered) else before.snapshot,
    )
    return after if after != Requests() else None


def answered_restart(owner: Owner, before: str | None, running_for: str | None) -> str | None:
    """Return the latest completed restart request. `running_for` is the request that the present pods carried out."""
    request = _shortened_request(owner, RESTART_REQUEST_ANNOTATION)
    return request if _is_done(request, request == running_for) else before


def restart_events(before: str | None, request: str | None, subject: str) -> tuple[Emit, ...]:
    """Return the Events for a new status.

    `subject` is the beginning of the message, for example "The worker was".
    """
    if request is None or request == before:
        return ()
    if not is_time(request):
        return (_unreadable(RESTART_REQUEST_ANNOTATION, request),)
    return (Emit(EventType.NORMAL, "Restarted", f"{subject} restarted, as requested at {request}."),)


def request_events(
    session: TrainingSession, after: Requests | None, snapshot: SnapshotAnswer | None
) -> tuple[Emit, ...]:
    """Return the Events for the new status `after`."""
    before, after = session.status.requests or Requests(), after or Requests()
    events = [*restart_events(before.restart, after.restart, "The worker was")]
    if after.snapshot is not None and after.snapshot != before.snapshot:
        events.append(_snapshot(after.snapshot, snapshot))
    return tuple(events)


def _shortened_request(owner: Owner, name: str) -> str | None:
    text = owner.annotations.get(name)
    return text[:LONGEST_REQUEST] if text is not None else None


def _is_done(request: str | None, is_answered: bool) -> bool:
    """Return whether a request needs no further action.

    An unreadable request needs only an Event.
    """
    return request is not None and (is_answered or not is_time(request))


def _snapshot(request: str, answer: SnapshotAnswer | None) -> Emit:
    if not is_time(request):
        return _unreadable(SNAPSHOT_REQUEST_ANNOTATION, request)
    if answer is not None and answer.problem is not None:
        message = f"The worker refused the snapshot that was requested at {request}: {quoted(answer.problem)}."
        return Emit(EventType.WARNING, "SnapshotRefused", message)
    return Emit(EventType.NORMAL, "SnapshotTaken", f"Every adapter is on disk, as requested at {request}.")


def _unreadable(annotation: str, request: str) -> Emit:
    return Emit(
        EventType.WARNING,
        "RequestUnreadable",
        f"The annotation {annotation} is not a time, so the operator does nothing: {quoted(request)}. Set it to the "
        "present time, such as 2026-01-31T12:00:00Z.",
    )
