"""The claim of the journal's volume."""

from __future__ import annotations

from collections.abc import Mapping

from tinsmith_operator.build.metadata import child_labels
from tinsmith_operator.model.base import Manifest
from tinsmith_operator.model.session import TrainingSession


def build_claim(session: TrainingSession, annotations: Mapping[str, str]) -> Manifest | None:
    """Without an owner, so that it outlives the session. None when the session uses a claim that is there already."""
    storage = session.spec.storage
    if storage.existing_claim is not None:
        return None
    spec: Manifest = {
        "accessModes": [storage.access_mode.value],
        "resources": {"requests": {"storage": str(storage.size)}},
        "volumeMode": "Filesystem",
    }
    if storage.storage_class_name is not None:
        spec["storageClassName"] = storage.storage_class_name
    metadata = {
        "name": session.claim_name,
        "namespace": session.namespace,
        "labels": child_labels(session),
        "annotations": dict(annotations),
    }
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata, "spec": spec}


def build_claim_annotations(session: TrainingSession, annotations: Mapping[str, str]) -> Manifest:
    """All that the operator says of a claim that somebody else made."""
    metadata = {"name": session.claim_name, "namespace": session.namespace, "annotations": dict(annotations)}
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata}
