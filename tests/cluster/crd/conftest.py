"""The CRD on a real API server, which is the only one that knows what it means."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from support.kubernetes.crds import install_crds
from support.kubernetes.fixtures import Cluster

Manifest = dict[str, Any]
Kubectl = Callable[..., str]


@pytest.fixture(scope="session")
def definition(api_cluster: Cluster) -> None:
    """The CRDs are installed."""
    install_crds(api_cluster.kubectl)


@pytest.fixture
def kubectl(api_cluster: Cluster, definition: None, namespace: str) -> Kubectl:
    """In a namespace of the test's own; manifests are given as `manifest=`."""

    def run(*arguments: str, manifest: Manifest | None = None) -> str:
        stdin = json.dumps(manifest) if manifest is not None else None
        return api_cluster.kubectl(f"--namespace={namespace}", *arguments, stdin=stdin)

    return run


def try_to_create(kubectl: Kubectl, manifest: Manifest) -> Manifest:
    """As the API server would keep it."""
    answer: Manifest = json.loads(
        kubectl("create", "--dry-run=server", "--output=json", "--filename=-", manifest=manifest)
    )
    return answer


def assert_taken(kubectl: Kubectl, built: list[Manifest], namespace: str) -> None:
    """What an operator would create; whoever makes the keys fills a Secret."""
    pair = {"tls.crt": "certificate", "tls.key": "key", "ca.crt": "authority"}
    for manifest in built:
        data = {"stringData": pair} if manifest["kind"] == "Secret" else {}
        placed = {**manifest, **data, "metadata": {**manifest["metadata"], "namespace": namespace}}
        kubectl("create", "--dry-run=server", "--validate=strict", "--filename=-", manifest=placed)
