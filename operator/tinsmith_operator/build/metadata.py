"""What all children of a session or a pool have in common."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from tinsmith_operator.api.base import Manifest
from tinsmith_operator.api.names import (
    CONFIGURATION_ANNOTATION,
    CONVERSION_APPLICATION,
    IMAGE_PULL_APPLICATION,
    MANAGED_BY_LABEL,
    MANAGER,
    MEMBER_APPLICATION,
)
from tinsmith_operator.api.owner import Owner


def fingerprint(value: Any) -> str:
    """The same for the same content, whatever the order of its keys."""
    content = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def selector_labels(owner: Owner) -> dict[str, str]:
    """Which pods are this owner's. They select in objects that cannot be changed: never add to them."""
    return {"app.kubernetes.io/name": owner.APPLICATION, owner.LABEL: owner.name}


def member_selector(owner: Owner) -> dict[str, str]:
    """The pods of a session that are not its worker: other than what selects the worker."""
    return {"app.kubernetes.io/name": MEMBER_APPLICATION, owner.LABEL: owner.name}


def converter_selector(owner: Owner) -> dict[str, str]:
    """The pods of the Job that converts a session's model: neither its worker nor a member of its group."""
    return {"app.kubernetes.io/name": CONVERSION_APPLICATION, owner.LABEL: owner.name}


def puller_selector(owner: Owner) -> dict[str, str]:
    """The pods of the Job that pulls an image: none of the session's own."""
    return {"app.kubernetes.io/name": IMAGE_PULL_APPLICATION, owner.LABEL: owner.name}


def child_labels(owner: Owner) -> dict[str, str]:
    return {
        **selector_labels(owner),
        "app.kubernetes.io/instance": owner.name,
        "app.kubernetes.io/component": owner.COMPONENT,
        MANAGED_BY_LABEL: MANAGER,
    }


def child_metadata(owner: Owner, name: str) -> Manifest:
    return {
        "name": name,
        "namespace": owner.namespace,
        "labels": child_labels(owner),
        "ownerReferences": [owner.owner_reference],
    }


def sealed(manifest: Manifest) -> Manifest:
    """With the hash of itself: a comparison then also finds a field that is wanted no more."""
    metadata = manifest["metadata"]
    annotations = {**metadata.get("annotations", {}), CONFIGURATION_ANNOTATION: fingerprint(manifest)}
    return {**manifest, "metadata": {**metadata, "annotations": annotations}}
