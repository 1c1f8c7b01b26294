"""Tests that need a real Kubernetes: bare/ looks at the clusters themselves."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from support.kubernetes.crds import install_crds
from support.kubernetes.fixtures import (
    Cluster,
    api_cluster,
    fresh_cluster,
    namespace,
    node_cluster,
    pytest_collection_finish,
    pytest_runtest_makereport,
    two_node_cluster,
)
from support.kubernetes.kubectl import KubectlUser, Kubelet, hands_on

__all__ = [
    "api_cluster",
    "fresh_cluster",
    "namespace",
    "node_cluster",
    "pytest_collection_finish",
    "pytest_runtest_makereport",
    "two_node_cluster",
]


@pytest.fixture(scope="session")
def kinds(api_cluster: Cluster) -> None:
    """Return the cluster with the CRDs."""
    install_crds(api_cluster.kubectl)


@pytest.fixture
async def hands(
    api_cluster: Cluster, kinds: None, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[KubectlUser]:
    """Return kubectl for the test's namespace. Operators that the test starts find the cluster by $KUBECONFIG."""
    monkeypatch.setenv("KUBECONFIG", str(api_cluster.kubeconfig))
    async with hands_on(api_cluster.kubeconfig, namespace) as hands:
        yield hands


@pytest.fixture
async def kubelet(hands: KubectlUser) -> AsyncIterator[Kubelet]:
    kubelet = Kubelet(hands)
    async with kubelet.at_work():
        yield kubelet
