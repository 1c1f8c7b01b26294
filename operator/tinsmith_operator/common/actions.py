"""The actions that a decision consists of: what can be done about a session or pool, and its children.

Whoever does it knows no rule: each action in turn, until one fails; the next decision starts from what is there then.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from tinsmith_operator.api.base import Manifest


class EventType(StrEnum):
    NORMAL = "Normal"
    WARNING = "Warning"


@dataclass(frozen=True)
class Create:
    """POST: an object of that name, whosever it is, makes it fail and stays as it is."""

    manifest: Manifest


@dataclass(frozen=True)
class Apply:
    """Server-side apply with force, of exactly this object at exactly this version.

    The object was created by POST, which the API server books as an *Update* by our field manager. Such an entry of
    `metadata.managedFields` must first be turned into an *Apply* (one JSON patch), or fields that are no longer in the
    manifest stay in the object for ever.
    """

    manifest: Manifest
    uid: str
    resource_version: str


@dataclass(frozen=True)
class Annotate:
    """Merge patch of the annotations of this very version of the object."""

    kind: str
    name: str
    uid: str
    resource_version: str
    annotations: Mapping[str, str]


@dataclass(frozen=True)
class Delete:
    """Delete the object with this UID, and this version if one is named. An absent object counts as deleted.

    grace_period_seconds: of a pod; None leaves it to the object.
    why: for the log.
    """

    kind: str
    name: str
    uid: str
    why: str
    grace_period_seconds: int | None = None
    resource_version: str | None = None


@dataclass(frozen=True)
class IssueCertificate:
    """Make a key and a leaf for these names, put them into the data of this Secret, and write it.

    manifest: the whole Secret but for `data`.
    uid, resource_version: of the Secret to apply to; None creates it.
    """

    manifest: Manifest
    dns_names: tuple[str, ...]
    uid: str | None
    resource_version: str | None


@dataclass(frozen=True)
class WriteStatus:
    """The whole status, in place of the one at the session's resource version."""

    status: Manifest


@dataclass(frozen=True)
class AddFinalizer:
    """Guarded by the session's UID and resource version."""

    name: str


@dataclass(frozen=True)
class RemoveFinalizer:
    """Guarded by the session's UID and resource version."""

    name: str


@dataclass(frozen=True)
class Emit:
    """A Kubernetes Event about the session."""

    type: EventType
    reason: str
    message: str


Action = Create | Apply | Annotate | Delete | IssueCertificate | WriteStatus | AddFinalizer | RemoveFinalizer | Emit


@dataclass(frozen=True)
class Decision:
    """requeue_after_seconds: decide again by then even if nothing is heard; None leaves it to events and the resync.
    wants_turn: it would restart for what nobody asked of it, or has done so and is not back yet; None where
        nothing was found out about it.
    """

    actions: tuple[Action, ...]
    requeue_after_seconds: float | None = None
    wants_turn: bool | None = None
