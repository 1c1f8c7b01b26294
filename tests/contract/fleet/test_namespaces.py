"""A fleet of several namespaces, with a real Kubernetes API: what is of the same name in two of them stays apart."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import yaml
from support.server.fleet_under_test import START_SECONDS
from support.server.operator_stand_in import MODEL, StandInOperator, reached_at
from testcluster.cluster import Cluster
from tinsmith_server.fleet.kubernetes.fleet import KubernetesFleet
from tinsmith_server.settings import Settings
from tinsmith_server.store.store import Store

RIGHTS = {
    "tinsmith.dev": ("trainingsessions", "samplerpools", "sessiontemplates"),
    "discovery.k8s.io": ("endpointslices",),
    "": ("persistentvolumeclaims",),
}


@pytest.fixture
def other_namespace(crd: Cluster) -> Iterator[str]:
    name = f"test-{uuid.uuid4().hex[:8]}"
    crd.make_namespace(name)
    yield name
    crd.delete_namespace(name)


@pytest.fixture
async def other(crd: Cluster, other_namespace: str, operator: StandInOperator) -> AsyncIterator[StandInOperator]:
    """Return an operator of the same installation in another namespace."""
    other = StandInOperator(crd, other_namespace, operator.tls_directory.parent / "other")
    other.authority = operator.authority
    yield other
    await other.close()


@asynccontextmanager
async def opened(settings: Settings, store: Store, *namespaces: str) -> AsyncIterator[KubernetesFleet]:
    fleet = KubernetesFleet(settings.model_copy(update={"fleet_namespaces": namespaces}), reached_at)
    try:
        await fleet.open(store)
        yield fleet
    finally:
        await fleet.close()


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(START_SECONDS):
        while not holds():
            await asyncio.sleep(0.01)


async def test_sessions_and_pools_of_one_name_in_two_namespaces_are_different_ones(
    cluster_settings: Settings, store: Store, operator: StandInOperator, other: StandInOperator
) -> None:
    async with opened(cluster_settings, store, operator.namespace, other.namespace) as fleet:
        for each in (operator, other):
            await each.apply("tiny")
            await each.run("tiny")
            await each.apply_pool("fast")
            await each.run_replica("fast")
        await until(lambda: len(fleet.samplers(MODEL)) == 4)
        assert {one.name for one in fleet.trainers(MODEL, 8)} == {operator.title("tiny"), other.title("tiny")}
        for each in (operator, other):
            worker_id = each.workers["tiny"].worker_id
            await fleet.worker(worker_id).connection(START_SECONDS)
            assert (await store.get_worker(worker_id)).home.startswith(f"{each.title('tiny')}@")
        await other.suspend("tiny")
        await until(lambda: len(fleet.trainers(MODEL, 8)) == 1)
        assert f"TrainingSession {other.title('tiny')} is suspended" in await fleet.provide(MODEL)
        assert f"kubectl --namespace {other.namespace} patch" in await fleet.provide(MODEL)


async def test_a_worker_is_lost_by_the_claims_of_its_own_namespace(
    cluster_settings: Settings, store: Store, operator: StandInOperator, other: StandInOperator
) -> None:
    async with opened(cluster_settings, store, operator.namespace, other.namespace) as fleet:
        for each in (operator, other):
            await each.apply("tiny")
            worker = await each.run("tiny")
            await until(lambda worker=worker: worker.worker_id in {one.worker_id for one in fleet.workers})
            await fleet.worker(worker.worker_id).connection(START_SECONDS)
            await each.delete("tiny")
        await until(lambda: not fleet.workers)
        await other.kubectl("delete", "persistentvolumeclaim", "tiny-journal")
        await other.until_gone("persistentvolumeclaim", "tiny-journal")
        kept, lost = [await store.get_worker(each.workers["tiny"].worker_id) for each in (operator, other)]
        assert await fleet.permanently_lost_reason(kept) is None
        sentence = f"the volume of TrainingSession {other.title('tiny')} was deleted"
        assert await fleet.permanently_lost_reason(lost) == sentence
    async with opened(cluster_settings, store, operator.namespace) as narrow:
        assert await narrow.permanently_lost_reason(lost) is None


async def test_the_whole_cluster_is_one_fleet(
    cluster_settings: Settings, store: Store, operator: StandInOperator, other: StandInOperator
) -> None:
    async with opened(cluster_settings, store, "*") as fleet:
        model = f"org/{operator.namespace}"
        for each in (operator, other):
            await each.apply("tiny", model=model)
            await each.run("tiny")
        names = {operator.title("tiny"), other.title("tiny")}
        await until(lambda: {one.name for one in fleet.trainers(model, 8)} == names)
        await other.apply_pool("fast", model=model)
        await other.run_replica("fast")
        await until(lambda: any(one.kind == "pool" for one in fleet.samplers(model)))


async def test_sessions_are_made_from_the_templates_of_the_first_namespace_of_a_server_that_has_none_of_its_own(
    cluster_settings: Settings, store: Store, operator: StandInOperator, other: StandInOperator
) -> None:
    """Sessions of the same name in other namespaces belong to other releases, and do not count here."""
    for each in (operator, other):
        await each.apply_template("tiny")
    await operator.apply("tiny-1", model="org/unrelated")
    async with opened(cluster_settings, store, other.namespace, operator.namespace) as fleet:
        assert await fleet.provide(MODEL) == f"TrainingSession {other.title('tiny-1')} is being created"
        assert await other.session_names() == ["tiny-1"]
        assert await operator.session_names() == ["tiny-1"]


async def restrict_to(operator: StandInOperator, cluster: Cluster, folder: Path) -> Path:
    """Write a kubeconfig of a service account with the API server's rights in the operator's namespace alone."""
    rules = [
        {"apiGroups": [group], "resources": list(resources), "verbs": ["get", "list", "watch"]}
        for group, resources in RIGHTS.items()
    ]
    role = {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", "metadata": {"name": "api"}, "rules": rules}
    await operator.kubectl("apply", "--filename=-", stdin=json.dumps(role))
    await operator.kubectl(
        "create", "rolebinding", "api", "--role=api", f"--serviceaccount={operator.namespace}:default"
    )
    token = (await operator.kubectl("create", "token", "default")).strip()
    kubeconfig = yaml.safe_load(cluster.kubeconfig.read_text())
    for user in kubeconfig["users"]:
        user["user"] = {"token": token}
    file = folder / "restricted.kubeconfig"
    file.write_text(yaml.safe_dump(kubeconfig))
    return file


async def test_a_namespace_that_is_kept_from_the_server_holds_up_no_other_and_is_seen_once_it_is_granted(
    cluster_settings: Settings,
    store: Store,
    crd: Cluster,
    operator: StandInOperator,
    other: StandInOperator,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With no right beyond its namespaces: nothing is asked of the whole cluster."""
    for each in (operator, other):
        await each.apply("tiny")
        await each.run("tiny")
    monkeypatch.setenv("KUBECONFIG", str(await restrict_to(operator, crd, tmp_path)))
    async with opened(cluster_settings, store, operator.namespace, other.namespace) as fleet:
        assert [one.name for one in fleet.trainers(MODEL, 8)] == [operator.title("tiny")]
        assert fleet.problem is None
        account = f"--serviceaccount={operator.namespace}:default"
        rule = {"apiGroups": ["tinsmith.dev"], "resources": ["trainingsessions"], "verbs": ["list", "watch"]}
        metadata = {"name": "sessions"}
        role = {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", "metadata": metadata, "rules": [rule]}
        await other.kubectl("apply", "--filename=-", stdin=json.dumps(role))
        await other.kubectl("create", "rolebinding", "sessions", "--role=sessions", account)
        await until(lambda: len(fleet.trainers(MODEL, 8)) == 2)
