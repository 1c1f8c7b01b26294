"""The actions that make up a decision: changes of a session or pool, and of the children of this owner.

The operator carries out the actions in order, and stops at the first action that fails. The next decision starts from
the new state of the cluster.
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
    """A POST. If an object with this name exists, the POST fails and the object stays unchanged."""

    manifest: Manifest


@dataclass(frozen=True)
class Apply:
    """A server-side apply with force, to this version of this object.

    The API server has recorded the creation of the object by POST as an *Update* by the operator's field manager. So
    before the apply, a JSON patch must change the *Update* entry of `metadata.managedFields` to an *Apply*. Without the
    JSON patch, fields that are no longer in the manifest would stay in the object.
    """

    manifest: Manifest
    uid: str
    resource_version: str


@dataclass(frozen=True)
class Annotate:
    """A merge patch of the annotations of this version of the object.

    - `desired`: the whole desired object, if a later decision must know that the API server has stored this request.
    """

    kind: str
    name: str
    uid: str
    resource_version: str
    annotations: Mapping[str, str]
    desired: Manifest | None = None


@dataclass(frozen=True)
class Delete:
    """A deletion of the object with this UID. If a version is given, the object must also have this version.

    An object that does not exist counts as deleted.

    - `grace_period_seconds`: the grace period of a pod; None: the grace period in the pod's spec.
    - `why`: the reason, for the log.
    """

    kind: str
    name: str
    uid: str
    why: str
    grace_period_seconds: int | None = None
    resource_version: str | None = None


@dataclass(frozen=True)
class IssueCertificate:
    """A new key and certificate for `names`, written into the data of a Secret.

    - `manifest`: the whole Secret without `data`.
    - `uid`, `resource_version`: the UID and version of the existing Secret; None: the Secret is created.
    """

    manifest: Manifest
    dns_names: tuple[str, ...]
    uid: str | None
    resource_version: str | None


@dataclass(frozen=True)
class WriteStatus:
    """A write of the whole status, if the owner still has the observed version."""

    status: Manifest


@dataclass(frozen=True)
class AddFinalizer:
    """A change of the session's finalizers, if the session still has the observed UID and version."""

    name: str


@dataclass(frozen=True)
class RemoveFinalizer:
    """A change of the session's finalizers, if the session still has the observed UID and version."""

    name: str


@dataclass(frozen=True)
class Emit:
    """A Kubernetes Event about the session or pool."""

    type: EventType
    reason: str
    message: str


Action = Create | Apply | Annotate | Delete | IssueCertificate | WriteStatus | AddFinalizer | RemoveFinalizer | Emit


@dataclass(frozen=True)
class Decision:
    """The actions to carry out now, and the time of the next decision.

    - `requeue_after_seconds`: the longest time until the next decision; None: decide again at the next event or resync.
    - `wants_turn`: the session waits for its turn of an automatic restart, or has its turn but does not serve again
      yet; None: unknown.
    """

    actions: tuple[Action, ...]
    requeue_after_seconds: float | None = None
    wants_turn: bool | None = None
