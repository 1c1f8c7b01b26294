"""The operator against a real API server with its controllers, and no node: tests play the kubelet."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support.kubernetes.api_proxy import ApiProxy, proxy_to
from support.kubernetes.fixtures import Cluster
from support.kubernetes.kubectl import KubectlUser


@pytest.fixture
async def proxy(
    hands: KubectlUser, api_cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[ApiProxy]:
    """Operators that the test starts go through it."""
    async with proxy_to(api_cluster.kubeconfig) as proxy, proxy.serve(tmp_path) as kubeconfig:
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
        yield proxy
