"""The common part of TrainingSessions and SamplerPools.

A session or pool owns the objects that the operator creates for it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, ClassVar

from pydantic import ValidationError

from tinsmith_operator.api.base import Manifest, parse_time
from tinsmith_operator.api.names import API_VERSION
from tinsmith_operator.api.serving_spec import ServingSpec
from tinsmith_operator.api.status import OwnerStatus


class Unreadable(ValueError):
    """An object that does not match the operator's CRD, because the cluster has another version of the CRD."""


@dataclass(frozen=True)
class Owner(ABC):
    """A TrainingSession or SamplerPool.

    NOUN: the word for the owner in messages. LABEL: the label on each child with the owner's name. APPLICATION,
    COMPONENT: further labels.
    """

    KIND: ClassVar[str]
    NOUN: ClassVar[str]
    LABEL: ClassVar[str]
    APPLICATION: ClassVar[str]
    COMPONENT: ClassVar[str]

    name: str
    namespace: str
    uid: str
    generation: int
    resource_version: str
    finalizers: tuple[str, ...]
    annotations: Mapping[str, str]
    creation_time: datetime | None
    deletion_time: datetime | None
    spec: ServingSpec
    status: OwnerStatus

    @property
    @abstractmethod
    def workload_name(self) -> str:
        """The name of the owner's workload, Service and NetworkPolicy."""

    @property
    def is_being_deleted(self) -> bool:
        return self.deletion_time is not None

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
    }


def unreadable(kind: str, body: Mapping[str, Any], error: ValidationError) -> Unreadable:
    """Return an error with the name of the invalid field."""
    metadata, first = body["metadata"], error.errors()[0]
    place = ".".join(str(part) for part in first["loc"])
    return Unreadable(
        f"{kind} {metadata['namespace']}/{metadata['name']} cannot be read: {place}: {first['msg']}. "
        "Install the CRD that belongs to this operator."
    )
