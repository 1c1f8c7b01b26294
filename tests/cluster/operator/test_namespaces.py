"""An operator for its own namespace, for several, or for the cluster, with the rights that the chart gives for that."""

from __future__ import annotations

import re
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from support.kubernetes.api_proxy import proxy_to
from support.kubernetes.chart_account import grant, kubeconfig_of_the_account, rights_of
from support.kubernetes.fixtures import Cluster
from support.kubernetes.kubectl import KubectlUser, Kubelet, hands_on
from support.operator.operators import (
    WAIT_SECONDS,
    OperatorProgram,
    comes_to_rest,
    eventually,
    operator_program,
    running,
    session_manifest,
    settings_for,
)
from testcluster.ports import free_port
from tinsmith_operator.kube.resources import SERVICES, SESSIONS, WATCHED
from tinsmith_operator.settings import Settings

# Kopf asks again after 30 s at the latest.
ENTERED_SECONDS = 30 + WAIT_SECONDS


@pytest.fixture
def elsewhere(api_cluster: Cluster, kinds: None) -> Iterator[str]:
    """Return a second namespace, unknown to the fixtures of operators."""
    name = f"test-{uuid.uuid4().hex[:8]}"
    api_cluster.make_namespace(name)
    yield name
    api_cluster.delete_namespace(name)


@asynccontextmanager
async def tended(cluster: Cluster, namespace: str) -> AsyncIterator[KubectlUser]:
    """Return a namespace in which pods become ready."""
    async with hands_on(cluster.kubeconfig, namespace) as hands, Kubelet(hands).at_work():
        yield hands


def settings_of(namespace: str, watched: str) -> Settings:
    return settings_for(namespace, watch_namespaces=watched, health_port=free_port())


def refused_for_rights(program: OperatorProgram) -> list[str]:
    """Return the denied requests, except for creates in namespaces that terminate: other tests leave such."""
    return [line for line in program.lines if re.search(r"forbidden: User", line, re.IGNORECASE)]


async def readiness(settings: Settings) -> tuple[int, str]:
    try:
        url = f"http://127.0.0.1:{settings.health_port}/readyz"
        async with aiohttp.ClientSession() as session, session.get(url) as response:
            return response.status, await response.text()
    except aiohttp.ClientError:
        return 0, ""


async def test_a_forbidden_namespace_does_not_delay_the_others(
    api_cluster: Cluster,
    hands: KubectlUser,
    kubelet: Kubelet,
    elsewhere: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A missing one holds up none, either. Each is served as soon as the operator may."""
    rights = rights_of(hands.namespace, namespaces=[hands.namespace, elsewhere])
    later = [each for each in rights if each["metadata"].get("namespace") == elsewhere]
    grant(api_cluster, [each for each in rights if each not in later])
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig_of_the_account(api_cluster, hands.namespace, tmp_path)))
    settings = settings_of(hands.namespace, f"{hands.namespace},{elsewhere},not-there")
    async with tended(api_cluster, elsewhere) as others, operator_program(settings) as program:
        await others.create(SESSIONS, session_manifest())
        await hands.create(SESSIONS, session_manifest())
        await comes_to_rest(hands, "WorkerReady")
        status, text = await readiness(settings)
        assert status == 200
        assert f"The operator does nothing in namespace {elsewhere}," in text
        assert "The operator does nothing in namespace not-there," in text
        assert await others.all(SERVICES) == []
        grant(api_cluster, later)
        await comes_to_rest(others, "WorkerReady", seconds=ENTERED_SECONDS)
        _, text = await readiness(settings)
        assert elsewhere not in text
        await others.delete(SERVICES, "tiny")

        async def is_back() -> Any:
            return await others.get(SERVICES, "tiny")

        await eventually(is_back, "the Service of the other namespace is back")
        assert "at the cluster scope" not in program.log


@pytest.mark.parametrize("in_two", [False, True], ids=["its own namespace", "two namespaces"])
async def test_nothing_outside_its_namespaces_is_ever_asked_for(
    api_cluster: Cluster,
    hands: KubectlUser,
    kubelet: Kubelet,
    elsewhere: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    in_two: bool,
) -> None:
    """Seen on the wire, by an operator that might do more."""
    namespaces = [hands.namespace, elsewhere] if in_two else [hands.namespace]
    async with proxy_to(api_cluster.kubeconfig) as proxy, proxy.serve(tmp_path) as kubeconfig:
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
        settings = settings_for(hands.namespace, watch_namespaces=",".join(namespaces) if in_two else "")
        async with running(settings):
            await hands.create(SESSIONS, session_manifest())
            await comes_to_rest(hands, "WorkerReady")
    objects = [path for path, call in zip(proxy.paths, proxy.calls, strict=True) if call.resource != "discovery"]
    inside = tuple(f"/namespaces/{namespace}/" for namespace in namespaces)
    assert [path for path in objects if not any(part in path for part in inside)] == []
    listed = {call.resource for call in proxy.calls if call.verb == "list"}
    assert listed >= {resource.plural for resource in WATCHED}


async def test_an_operator_for_the_cluster_looks_after_namespaces_that_come_later(
    api_cluster: Cluster,
    hands: KubectlUser,
    kubelet: Kubelet,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rights = rights_of(hands.namespace, cluster=True)
    for each in rights:
        if each["kind"].startswith("ClusterRole"):
            # Two tests of one cluster would share them.
            each["metadata"]["name"] += f"-{hands.namespace}"
        if each["kind"] == "ClusterRoleBinding":
            each["roleRef"]["name"] += f"-{hands.namespace}"
    grant(api_cluster, rights)
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig_of_the_account(api_cluster, hands.namespace, tmp_path)))
    async with operator_program(settings_for(hands.namespace, watch_namespaces="*")) as program:
        await hands.create(SESSIONS, session_manifest())
        await comes_to_rest(hands, "WorkerReady")
        name = f"test-{uuid.uuid4().hex[:8]}"
        api_cluster.make_namespace(name)
        async with tended(api_cluster, name) as others:
            await others.create(SESSIONS, session_manifest())
            await comes_to_rest(others, "WorkerReady")
        api_cluster.delete_namespace(name)
        assert refused_for_rights(program) == []
    bound = [each for each in rights if each["kind"].startswith("ClusterRole")]
    api_cluster.kubectl("delete", *(f"{each['kind']}/{each['metadata']['name']}".lower() for each in bound))
