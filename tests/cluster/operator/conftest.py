"""The operator against a real API server with its controllers, and no node: tests play the kubelet."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support.api_hands import ApiHands, Kubelet, hands_on
from support.api_proxy import ApiProxy, proxy_to
from support.cluster_fixtures import Cluster
from support.crds import install_crds


@pytest.fixture(scope="session")
def kinds(api_cluster: Cluster) -> None:
    """The CRDs are installed."""
    install_crds(api_cluster.kubectl)


@pytest.fixture
async def hands(
    api_cluster: Cluster, kinds: None, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[ApiHands]:
    """On the test's namespace. Operators that the test starts find the cluster by $KUBECONFIG."""
    monkeypatch.setenv("KUBECONFIG", str(api_cluster.kubeconfig))
    async with hands_on(api_cluster.kubeconfig, namespace) as hands:
        yield hands


@pytest.fixture
async def kubelet(hands: ApiHands) -> AsyncIterator[Kubelet]:
    kubelet = Kubelet(hands)
    async with kubelet.at_work():
        yield kubelet


@pytest.fixture
async def proxy(
    hands: ApiHands, api_cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[ApiProxy]:
    """Operators that the test starts go through it."""
    async with proxy_to(api_cluster.kubeconfig) as proxy, proxy.serve(tmp_path) as kubeconfig:
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
        yield proxy
