"""The metadata that all children of a session or pool share."""

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
    """Return a hash of the content. The hash does not depend on the order of the keys."""
    content = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def selector_labels(owner: Owner) -> dict[str, str]:
    """Return the labels that select the owner's pods.

    Never add a label, because these labels are in immutable fields such as a Deployment's selector.
    """
    return {"app.kubernetes.io/name": owner.APPLICATION, owner.LABEL: owner.name}


def member_selector(owner: Owner) -> dict[str, str]:
    """Return the labels that select the member pods of a group. These labels must not select the worker's pod."""
    return {"app.kubernetes.io/name": MEMBER_APPLICATION, owner.LABEL: owner.name}


def converter_selector(owner: Owner) -> dict[str, str]:
    """Return the labels that select the pods of the conversion Job."""
    return {"app.kubernetes.io/name": CONVERSION_APPLICATION, owner.LABEL: owner.name}


def puller_selector(owner: Owner) -> dict[str, str]:
    """Return the labels that select the pods of the image pull Job."""
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
    """Return the object with a hash of its content as an annotation.

    The hash lets a comparison find fields that must be removed.
    """
    metadata = manifest["metadata"]
    annotations = {**metadata.get("annotations", {}), CONFIGURATION_ANNOTATION: fingerprint(manifest)}
    return {**manifest, "metadata": {**metadata, "annotations": annotations}}
