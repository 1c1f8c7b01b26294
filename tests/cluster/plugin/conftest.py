"""`kubectl tinsmith` as people have it: a program on the PATH beside a real kubectl, against a real API server."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.api_hands import ApiHands, Kubelet, hands_on
from support.cluster_fixtures import Cluster
from support.crds import install_crds

PLUGIN = Path(sys.executable).with_name("kubectl-tinsmith")
_SECONDS = 240.0


@dataclass(frozen=True)
class Said:
    status: int
    out: str
    err: str


Plugin = Callable[..., Said]


@pytest.fixture(scope="session")
def kinds(api_cluster: Cluster) -> None:
    """Both kinds are known."""
    install_crds(api_cluster.kubectl)


def run_plugin(cluster: Cluster, namespace: str, words: Sequence[str], kubeconfig: Path | None = None) -> Said:
    """By kubectl, which finds it on the PATH."""
    path = os.pathsep.join([str(PLUGIN.parent), str(cluster.kubectl_program.parent), os.environ["PATH"]])
    command = [str(cluster.kubectl_program), "tinsmith", *words, f"--namespace={namespace}"]
    finished = subprocess.run(
        command,
        env={**os.environ, "PATH": path, "KUBECONFIG": str(kubeconfig or cluster.kubeconfig)},
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        check=False,
    )
    return Said(finished.returncode, finished.stdout, finished.stderr)


@pytest.fixture
def plugin(api_cluster: Cluster, kinds: None, namespace: str) -> Plugin:
    """In the test's namespace, as an administrator."""
    return lambda *words, kubeconfig=None: run_plugin(api_cluster, namespace, words, kubeconfig)


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


async def aside(plugin: Plugin, *words: str) -> Said:
    """While the test's operator goes on."""
    return await asyncio.to_thread(plugin, *words)
