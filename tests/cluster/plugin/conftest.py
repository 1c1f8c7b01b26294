"""`kubectl tinsmith` as users have it: a program on the PATH of a real kubectl, against a real API server."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.kubernetes.fixtures import Cluster

PLUGIN = Path(sys.executable).with_name("kubectl-tinsmith")
_SECONDS = 240.0


@dataclass(frozen=True)
class PluginResult:
    status: int
    out: str
    err: str


Plugin = Callable[..., PluginResult]


def run_plugin(cluster: Cluster, namespace: str, words: Sequence[str], kubeconfig: Path | None = None) -> PluginResult:
    """Run the plugin by kubectl, which finds it on the PATH."""
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
    return PluginResult(finished.returncode, finished.stdout, finished.stderr)


@pytest.fixture
def plugin(api_cluster: Cluster, kinds: None, namespace: str) -> Plugin:
    """Return the plugin in the test's namespace, as an administrator."""
    return lambda *words, kubeconfig=None: run_plugin(api_cluster, namespace, words, kubeconfig)


async def aside(plugin: Plugin, *words: str) -> PluginResult:
    """Run this while the test's operator works."""
    return await asyncio.to_thread(plugin, *words)
