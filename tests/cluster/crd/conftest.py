"""The CRD on a real API server, which is the only one that knows what it means."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from support.kubernetes.api_server import ApiNamespace, ApiServer
from support.kubernetes.crds import install_crds
from support.kubernetes.fixtures import Cluster, api_server, new_namespace, shared_namespace

__all__ = ["api_server", "shared_namespace"]

Manifest = dict[str, Any]
Kubectl = Callable[..., str]


@pytest.fixture(scope="session")
def definition(api_cluster: Cluster) -> None:
    """Return the cluster with the CRDs."""
    install_crds(api_cluster.kubectl)


@pytest.fixture(scope="session")
def api(api_server: ApiServer, definition: None, shared_namespace: str) -> ApiNamespace:
    """Return the namespace that the tests share: each deletes what it creates."""
    return ApiNamespace(api_server, shared_namespace)


@contextmanager
def stored_with_status(
    cluster: Cluster, api_server: ApiServer, manifest: Manifest, status: Manifest
) -> Iterator[Kubectl]:
    """kubectl in a namespace that has the object, with the status that the operator would write, and no other."""
    with new_namespace(cluster) as name:
        namespace = ApiNamespace(api_server, name)
        namespace.create(manifest)
        namespace.merge(manifest, {"status": status}, subresource="status")
        yield lambda *arguments: cluster.kubectl(f"--namespace={name}", *arguments)


def assert_taken(api: ApiNamespace, built: list[Manifest]) -> None:
    """Check that the API server takes what an operator would create. Another part fills the Secret."""
    pair = {"tls.crt": "certificate", "tls.key": "key", "ca.crt": "authority"}
    for manifest in built:
        data = {"stringData": pair} if manifest["kind"] == "Secret" else {}
        api.would_create({**manifest, **data, "metadata": {**manifest["metadata"], "namespace": api.name}})
