"""Sessions of several nodes with the real KubeRay, on a cluster of their own that begins without it.

KubeRay makes the pods, and the tests' kubelet lets them be ready. That ranks find each other in them is not seen here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.kubernetes.api_proxy import ApiProxy
from support.kubernetes.chart_account import grant, kubeconfig_of_the_account, rights_of
from support.kubernetes.crds import install_crds
from support.kubernetes.fixtures import Cluster, own_api_cluster
from support.kubernetes.kubectl import KubectlUser, Kubelet, is_of_a_job
from support.operator.built_sessions import MILES, NEMO_RL
from support.operator.operators import (
    WAIT_SECONDS,
    WRITES,
    comes_to_rest,
    condition_of,
    eventually,
    operator_program,
    running,
    session_manifest,
    settings_for,
)
from testcluster.addons.kuberay import install_kuberay_kinds, kuberay_operator
from tinsmith_operator.kube.resources import JOBS, PODS, RAY_CLUSTERS, SERVICES, SESSIONS, Resource

GROUP: dict[str, Any] = {**NEMO_RL, "parallelism": {"nodes": 3}, "modelCache": {"claimName": "models"}}
GROUP_OF_MILES: dict[str, Any] = {**MILES, "parallelism": {"nodes": 3}}
SLOW_SECONDS = 2 * WAIT_SECONDS


@pytest.fixture(scope="module")
def api_cluster() -> Iterator[Cluster]:
    with own_api_cluster() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def kinds(api_cluster: Cluster) -> None:
    """Install the CRDs in this module's own cluster."""
    install_crds(api_cluster.kubectl)


@pytest.fixture
def account(api_cluster: Cluster, hands: KubectlUser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Operators that the test starts have the rights of the chart's service account."""
    grant(api_cluster, rights_of(hands.namespace))
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig_of_the_account(api_cluster, hands.namespace, tmp_path)))


async def group_of(hands: KubectlUser) -> list[dict[str, Any]]:
    """All pods but those that converted the model before there were any."""
    return [pod for pod in await hands.all(PODS) if not is_of_a_job(pod)]


async def pods_of(hands: KubectlUser) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the head, and the members."""
    by_type: dict[str, list[dict[str, Any]]] = {"head": [], "worker": []}
    for pod in await group_of(hands):
        by_type[pod["metadata"]["labels"]["ray.io/node-type"]].append(pod)
    [head] = by_type["head"]
    return head, by_type["worker"]


def uid(pod: dict[str, Any]) -> str:
    text: str = pod["metadata"]["uid"]
    return text


def gone(hands: KubectlUser, resource: Resource, name: str) -> Callable[[], Awaitable[bool]]:
    async def look() -> bool:
        return await hands.get(resource, name) is None

    return look


@pytest.mark.timeout(900)
async def test_a_session_waits_for_kuberay_and_lives_its_life_by_it_with_the_rights_of_the_chart(
    api_cluster: Cluster, hands: KubectlUser, kubelet: Kubelet, account: None, tmp_path: Path
) -> None:
    settings = settings_for(hands.namespace, discovery_seconds=0.5, delete_grace_seconds=1)
    storage = {"retentionPolicy": {"whenDeleted": "Delete"}}
    async with operator_program(settings) as program:
        await hands.create(SESSIONS, session_manifest(**GROUP, storage=storage))
        await comes_to_rest(hands, "KubeRayMissing")
        install_kuberay_kinds(api_cluster.kubectl)
        with kuberay_operator(api_cluster.kubeconfig, hands.namespace, tmp_path / "kuberay.log"):
            await comes_to_rest(hands, "WorkerReady", seconds=SLOW_SECONDS)
            await _check_pods(hands)
            await _restarts_as_one(hands, kubelet)
            await hands.patch(SESSIONS, "tiny", {"spec": {"suspend": True}})
            await comes_to_rest(hands, "Suspended", seconds=SLOW_SECONDS)
            assert await group_of(hands) == []
            await hands.patch(SESSIONS, "tiny", {"spec": {"suspend": False}})
            await comes_to_rest(hands, "WorkerReady", seconds=SLOW_SECONDS)
            await _changes_as_one(hands)
            await hands.delete(SESSIONS, "tiny")
            await eventually(gone(hands, SESSIONS, "tiny"), "the session is gone", SLOW_SECONDS)
            await eventually(gone(hands, RAY_CLUSTERS, "tiny"), "the RayCluster is gone", SLOW_SECONDS)
    assert "forbidden" not in program.log.lower()


async def test_the_operator_keeps_fields_that_kuberay_adds(
    api_cluster: Cluster, hands: KubectlUser, kubelet: Kubelet, proxy: ApiProxy, tmp_path: Path
) -> None:
    install_kuberay_kinds(api_cluster.kubectl)
    with kuberay_operator(api_cluster.kubeconfig, hands.namespace, tmp_path / "kuberay.log"):
        async with running(settings_for(hands.namespace)):
            await hands.create(SESSIONS, session_manifest(**GROUP_OF_MILES))
            await comes_to_rest(hands, "WorkerReady", seconds=SLOW_SECONDS)
            # Its ranks read the model as it was published.
            assert await hands.all(JOBS) == []
            before, calls = await hands.get(SERVICES, "tiny"), len(proxy.calls)
            await hands.delete(SERVICES, "tiny")

            async def is_back() -> bool:
                service = await hands.get(SERVICES, "tiny")
                return before is not None and service is not None and uid(service) != uid(before)

            await eventually(is_back, "the operator has looked at everything again")
            await comes_to_rest(hands, "WorkerReady")
    written = {call.resource for call in proxy.calls[calls:] if call.verb in WRITES}
    assert "services" in written
    assert written.isdisjoint({"rayclusters", "pods", "networkpolicies"})


QUEUE_LABELS = {"kueue.x-k8s.io/queue-name": "gpus"}
FLAVOUR = {"example.com/gpu": "h200"}


class Queue:
    """Kueue's part, as it writes: its webhook into the operator's own request, its controller under its own name."""

    def __init__(self, hands: KubectlUser) -> None:
        self._hands = hands

    async def takes(self, resource: Resource, name: str) -> None:
        suspended = {"spec": {"suspend": True}}
        await self._hands.patch(resource, name, suspended, manager="tinsmith-operator")

    async def admits(self) -> None:
        cluster = await self._hands.get(RAY_CLUSTERS, "tiny")
        assert cluster is not None
        spec = cluster["spec"]
        for template in (spec["headGroupSpec"]["template"], spec["workerGroupSpecs"][0]["template"]):
            template["spec"]["nodeSelector"] = FLAVOUR
            template["spec"]["tolerations"] = [{"key": "gpus", "operator": "Exists"}]
        await self._hands.patch(RAY_CLUSTERS, "tiny", {"spec": {**spec, "suspend": False}}, manager="kueue")

    async def preempts(self) -> None:
        await self._hands.patch(RAY_CLUSTERS, "tiny", {"spec": {"suspend": True}}, manager="kueue")


@pytest.mark.timeout(600)
async def test_a_queue_says_when_a_group_runs_and_neither_it_nor_the_operator_undoes_the_other(
    api_cluster: Cluster, hands: KubectlUser, kubelet: Kubelet, proxy: ApiProxy, tmp_path: Path
) -> None:
    install_kuberay_kinds(api_cluster.kubectl)
    queue = Queue(hands)
    async with running(settings_for(hands.namespace, ray_cluster_labels=QUEUE_LABELS)):
        await hands.create(SESSIONS, session_manifest(**GROUP))
        await eventually(there(hands, RAY_CLUSTERS, "tiny"), "the RayCluster is there", SLOW_SECONDS)
        # Kueue's webhook does it in the same request, before KubeRay has seen anything.
        await queue.takes(RAY_CLUSTERS, "tiny")
        with kuberay_operator(api_cluster.kubeconfig, hands.namespace, tmp_path / "kuberay.log"):
            await _says_queued(hands)
            await _no_writes(proxy)
            await queue.admits()
            await comes_to_rest(hands, "WorkerReady", seconds=SLOW_SECONDS)
            await _no_writes(proxy)
            head, members = await pods_of(hands)
            for pod in (head, *members):
                assert FLAVOUR.items() <= pod["spec"]["nodeSelector"].items()
            await queue.preempts()
            await eventually(no_pods(hands), "the pods are gone", SLOW_SECONDS)
            await _says_queued(hands)
            await queue.admits()
            await comes_to_rest(hands, "WorkerReady", seconds=SLOW_SECONDS)
            # What an upgrade of the operator writes takes nothing back that the queue has said.
            before = {"metadata": {"annotations": {"tinsmith.dev/configuration": "old"}}}
            await hands.patch(RAY_CLUSTERS, "tiny", before)
            await _no_writes(proxy)
            cluster = await hands.get(RAY_CLUSTERS, "tiny")
    assert cluster is not None
    assert cluster["metadata"]["annotations"]["tinsmith.dev/configuration"] != "old"
    assert cluster["spec"]["suspend"] is False
    assert cluster["spec"]["headGroupSpec"]["template"]["spec"]["nodeSelector"] == FLAVOUR


def no_pods(hands: KubectlUser) -> Callable[[], Awaitable[bool]]:
    async def look() -> bool:
        return not await group_of(hands)

    return look


def there(hands: KubectlUser, resource: Resource, name: str) -> Callable[[], Awaitable[bool]]:
    async def look() -> bool:
        return await hands.get(resource, name) is not None

    return look


async def _says_queued(hands: KubectlUser) -> None:
    async def look() -> bool:
        ready = condition_of(await hands.get(SESSIONS, "tiny"), "Ready")
        return (ready.get("status"), ready.get("reason")) == ("False", "Queued")

    await eventually(look, "it says that its queue keeps it waiting", SLOW_SECONDS)


async def _no_writes(proxy: ApiProxy) -> None:
    """Three seconds in a row, in which what is there stays as it is."""

    async def look() -> bool:
        before = len(written(proxy))
        await asyncio.sleep(3)
        return len(written(proxy)) == before

    await eventually(look, "the operator is at rest", SLOW_SECONDS)


def written(proxy: ApiProxy) -> list[Any]:
    return [call for call in proxy.calls if call.verb in WRITES and call.resource not in ("leases", "events")]


async def _check_pods(hands: KubectlUser) -> None:
    """Check that KubeRay keeps what was built: the Service finds the worker alone, which starts with its arguments."""
    head, members = await pods_of(hands)
    service = await hands.get(SERVICES, "tiny")
    assert service is not None
    selected = [
        pod for pod in (head, *members) if service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    ]
    assert selected == [head]
    assert len(members) == 2
    [worker] = head["spec"]["containers"]
    assert worker["command"][0] == "/bin/bash"
    assert {"--engine=nemo-rl", "--nodes=3", "--ranks=3", "--ray-address=127.0.0.1:6379"} <= set(worker["args"])
    for pod in (head, *members):
        [container] = pod["spec"]["containers"]
        assert "RAY_AUTH_TOKEN" in {variable["name"] for variable in container["env"]}
    for member in members:
        [ray] = member["spec"]["containers"]
        assert ray["lifecycle"]["preStop"]
        assert "tcpSocket" in ray["livenessProbe"]
        mounted = {mount["mountPath"] for mount in ray["volumeMounts"]}
        assert mounted.isdisjoint({"/var/lib/tinsmith/journal", "/etc/tinsmith/tls"})


async def _restarts_as_one(hands: KubectlUser, kubelet: Kubelet) -> None:
    """Check that the worker restarted in its pod, and its former members were replaced."""
    head, members = await pods_of(hands)
    await kubelet.make_ready(head, restartCount=1)

    async def replaced() -> bool:
        now, others = await pods_of(hands)
        return uid(now) == uid(head) and len(others) == 2 and {*map(uid, others)}.isdisjoint(map(uid, members))

    await eventually(replaced, "members of the new run", SLOW_SECONDS)
    await comes_to_rest(hands, "WorkerReady", seconds=SLOW_SECONDS)


async def _changes_as_one(hands: KubectlUser) -> None:
    head, members = await pods_of(hands)
    before = {uid(head), *map(uid, members)}
    await hands.patch(SESSIONS, "tiny", {"spec": {"adapters": {"slots": 9}}})

    async def replaced() -> bool:
        now = await group_of(hands)
        return len(now) == 3 and before.isdisjoint(map(uid, now))

    await eventually(replaced, "all pods are others", SLOW_SECONDS)
    await comes_to_rest(hands, "WorkerReady", seconds=SLOW_SECONDS)
    head, _ = await pods_of(hands)
    assert "--adapter-slots=9" in head["spec"]["containers"][0]["args"]
