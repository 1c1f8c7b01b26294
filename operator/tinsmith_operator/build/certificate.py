"""The Secret with the certificate of a workload's pods."""

from __future__ import annotations

from tinsmith_operator.build.metadata import child_metadata
from tinsmith_operator.model.base import Manifest
from tinsmith_operator.model.names import certificate_secret_name
from tinsmith_operator.model.owner import Owner


def build_certificate_secret(owner: Owner) -> Manifest:
    """But for its data: tls.crt, tls.key and ca.crt come from whoever makes the key."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": child_metadata(owner, certificate_secret_name(owner.workload_name)),
        "type": "kubernetes.io/tls",
    }
