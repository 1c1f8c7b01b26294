"""The common parts of the resources that the operator reconciles: TrainingSessions, SamplerPools and SessionTemplates.

A session or pool owns the objects that the operator creates for it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, ClassVar

from pydantic import ValidationError
from pydantic_core import from_json

from tinsmith_operator.api.base import Manifest, parse_time
from tinsmith_operator.api.names import API_VERSION, PAUSED_ANNOTATION, WAKE_REQUEST_ANNOTATION
from tinsmith_operator.api.serving_spec import ServingSpec
from tinsmith_operator.api.status import OwnerStatus, ReconciledStatus

LONGEST_WAKE_REQUEST = 64


class Unreadable(ValueError):
    """An object that does not match the operator's CRD, because the cluster has another version of the CRD."""


@dataclass(frozen=True)
class Reconciled:
    """A resource that the operator reconciles, and whose status it writes. NOUN: the word for it in messages."""

    KIND: ClassVar[str]
    NOUN: ClassVar[str]

    name: str
    namespace: str
    uid: str
    generation: int
    resource_version: str
    finalizers: tuple[str, ...]
    annotations: Mapping[str, str]
    creation_time: datetime | None
    deletion_time: datetime | None
    wake_request: str | None
    status: ReconciledStatus

    @property
    def is_being_deleted(self) -> bool:
        return self.deletion_time is not None

    @property
    def is_paused(self) -> bool:
        """True if a user has asked the operator to write nothing but the status."""
        return self.annotations.get(PAUSED_ANNOTATION) == "true"


@dataclass(frozen=True)
class Owner(Reconciled, ABC):
    """A TrainingSession or SamplerPool.

    LABEL: the label on each child with the owner's name. APPLICATION, COMPONENT: further labels.
    """

    LABEL: ClassVar[str]
    APPLICATION: ClassVar[str]
    COMPONENT: ClassVar[str]

    spec: ServingSpec
    status: OwnerStatus

    @property
    @abstractmethod
    def workload_name(self) -> str:
        """The name of the owner's workload, Service and NetworkPolicy."""

    @property
    def deadline(self) -> datetime | None:
        """The time at which the owner must stop, by `spec.activeDeadlineSeconds`."""
        seconds = self.spec.active_deadline_seconds
        if seconds is None or self.creation_time is None:
            return None
        return self.creation_time + timedelta(seconds=seconds)

    @property
    def is_suspended_as_idle(self) -> bool:
        """True if the status says that the operator has suspended the owner because no client used it."""
        idle = self.status.idle
        return self.spec.idle is not None and idle is not None and idle.suspended_time is not None

    @property
    def owner_reference(self) -> Manifest:
        """The owner reference in the owner's children. Kubernetes deletes the children together with the owner."""
        return {
            "apiVersion": API_VERSION,
            "kind": self.KIND,
            "name": self.name,
            "uid": self.uid,
            "controller": True,
            "blockOwnerDeletion": True,
        }


def identity_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the owner's fields that come from the object's metadata."""
    metadata = body["metadata"]
    return {
        "name": metadata["name"],
        "namespace": metadata["namespace"],
        "uid": metadata["uid"],
        "generation": metadata["generation"],
        "resource_version": metadata["resourceVersion"],
        "finalizers": tuple(metadata.get("finalizers", ())),
        "annotations": metadata.get("annotations") or {},
        "creation_time": parse_time(metadata.get("creationTimestamp")),
        "deletion_time": parse_time(metadata.get("deletionTimestamp")),
        "wake_request": wake_request_of(body),
    }


def effective_spec(body: Mapping[str, Any]) -> Manifest:
    """Return the spec by which a session or pool runs.

    A session from a template runs by the copy of the template in its status. Its own spec adds only `suspend`. A
    session without a readable copy has no model, so that `parse_session` refuses it.
    """
    spec: Manifest = body.get("spec") or {}
    if "templateRef" not in spec:
        return spec
    copy = (body.get("status") or {}).get("template") or {}
    try:
        # This parser limits the depth. A deeper text would break the list of all sessions.
        copied = from_json(copy.get("spec", "{}"))
    except ValueError:
        return spec
    return {**copied, **spec} if isinstance(copied, dict) else spec


def wake_request_of(body: Mapping[str, Any]) -> str | None:
    """Return the latest wake requests of users and of API servers, as one text, or None without a request."""
    by_user = (body["metadata"].get("annotations") or {}).get(WAKE_REQUEST_ANNOTATION)
    by_server = (body.get("status") or {}).get("wantedTime")
    requests = [str(request)[:LONGEST_WAKE_REQUEST] for request in (by_user, by_server) if request is not None]
    return " ".join(requests) or None


def unreadable(kind: str, body: Mapping[str, Any], error: ValidationError) -> Unreadable:
    """Return an error with the name of the invalid field."""
    metadata, first = body["metadata"], error.errors()[0]
    place = ".".join(str(part) for part in first["loc"])
    return Unreadable(
        f"{kind} {metadata['namespace']}/{metadata['name']} cannot be read: {place}: {first['msg']}. "
        "Install the CRD that belongs to this operator."
    )
