"""What is read of the surroundings of a pool or session, and that reading subscribes to them."""

from __future__ import annotations

from typing import Any

import pytest
from support.operator.built_sessions import NEMO_RL
from support.operator.resources import make_pool, make_session
from tinsmith_operator.kube.cache import Cache
from tinsmith_operator.kube.resources import (
    BUDGETS,
    CLAIMS,
    DEPLOYMENTS,
    JOBS,
    PODS,
    RAY_CLUSTERS,
    SERVICES,
    SESSIONS,
    WORKLOADS,
    Key,
    Ref,
    Resource,
)
from tinsmith_operator.runtime.observe import observe_pool, observe_session

KEY = Key("research", "qwen", "SamplerPool")
POOL_LABEL = {"tinsmith.dev/pool": "qwen"}


def manifest(resource: Resource, name: str, uid: str, **metadata: Any) -> dict[str, Any]:
    identity = {"name": name, "namespace": "research", "uid": uid, "resourceVersion": "1"}
    return {"apiVersion": resource.api_version, "kind": resource.kind, "metadata": {**identity, **metadata}}


def pod(name: str, replica_set: str | None) -> dict[str, Any]:
    owners = [{"kind": "ReplicaSet", "name": replica_set, "uid": "rs", "controller": True}] if replica_set else []
    return manifest(PODS, name, f"uid-{name}", labels=POOL_LABEL, ownerReferences=owners)


@pytest.fixture
def enqueued() -> list[Key]:
    return []


@pytest.fixture
def cache(enqueued: list[Key]) -> Cache:
    return Cache(enqueued.append)


def test_a_pools_children_are_found_by_their_names(cache: Cache) -> None:
    for resource in (DEPLOYMENTS, SERVICES, BUDGETS):
        cache.note(manifest(resource, "qwen-sampler", f"uid-{resource.kind}"))
    observed = observe_pool(cache, KEY, make_pool(), None)
    found = [observed.workload, observed.service, observed.budget]
    assert [each["metadata"]["uid"] for each in found if each is not None] == [
        "uid-Deployment",
        "uid-Service",
        "uid-PodDisruptionBudget",
    ]


def test_its_pods_are_those_of_the_replica_sets_of_its_deployment(cache: Cache) -> None:
    """Anybody may give a pod our label; it is then not a replica."""
    cache.note(pod("ours", "qwen-sampler-6d4cf56db6"))
    cache.note(pod("of-another", "qwen-sampler-two-6d4cf56db6"))
    cache.note(pod("bare", None))
    observed = observe_pool(cache, KEY, make_pool(), None)
    assert [each["metadata"]["name"] for each in observed.pods] == ["ours"]


def test_a_pod_that_comes_later_brings_the_pool_back_into_the_queue(cache: Cache, enqueued: list[Key]) -> None:
    observe_pool(cache, KEY, make_pool(), None)
    cache.note(pod("ours", "qwen-sampler-6d4cf56db6"))
    assert enqueued == [KEY]


SESSION_KEY = Key("research", "qwen", "TrainingSession")
ONE_POD = make_session()
GROUP = make_session(**NEMO_RL, parallelism={"nodes": 3}, modelCache={"claimName": "models"})


def using(claim: str, name: str, made_at: str) -> dict[str, Any]:
    uid = ONE_POD.uid if name == ONE_POD.name else f"uid-{name}"
    session = manifest(SESSIONS, name, uid, creationTimestamp=made_at)
    return session | {"spec": {"storage": {"existingClaim": claim}}}


def by_default(made_at: str) -> dict[str, Any]:
    """Session qwen, with the claim that the operator makes for it."""
    return using("qwen-journal", "qwen", made_at) | {"spec": {}}


@pytest.mark.parametrize(
    ("other", "holder"),
    [
        (using("qwen-journal", "ada", "2026-01-01T00:00:00Z"), "ada"),
        (using("qwen-journal", "ada", "2026-01-03T00:00:00Z"), None),
        (using("another", "ada", "2026-01-01T00:00:00Z"), None),
        (using("qwen-journal", "ada", "2026-01-02T00:00:00Z"), None),
    ],
    ids=["made earlier", "made later", "another claim", "made in the same second, later by its uid"],
)
def test_of_the_sessions_that_name_one_claim_the_first_holds_it(
    cache: Cache, other: dict[str, Any], holder: str | None
) -> None:
    for session in (by_default("2026-01-02T00:00:00Z"), other):
        cache.note(session)
    assert observe_session(cache, SESSION_KEY, ONE_POD, None).claim_holder == holder


def test_a_session_whose_worker_has_the_claim_keeps_it(cache: Cache) -> None:
    """Of two that were made within a second, the one that was seen later may have the smaller UID."""
    cache.note(manifest(CLAIMS, "qwen-journal", "uid-claim"))
    now = "2026-01-02T00:00:00Z"
    for session in (by_default(now), using("qwen-journal", "zoe", now) | {"status": {"workerId": "uid-claim"}}):
        cache.note(session)
    assert observe_session(cache, SESSION_KEY, ONE_POD, None).claim_holder == "zoe"


def test_a_pod_that_outlives_its_session_keeps_the_claim(cache: Cache, enqueued: list[Key]) -> None:
    """It stops in its own time, or runs on where a node is silent: a second one must not write beside it."""
    cache.note(by_default("2026-01-02T00:00:00Z"))
    own, left = numbered_pod(), numbered_pod()
    left["metadata"] |= {"name": "ada-0", "uid": "uid-ada-0", "labels": {"tinsmith.dev/session": "ada"}}
    for pod in (own, left):
        pod["spec"] = {"volumes": [{"emptyDir": {}}, {"persistentVolumeClaim": {"claimName": "qwen-journal"}}]}
        cache.note(pod)
    assert observe_session(cache, SESSION_KEY, ONE_POD, None).claim_holder == "ada"
    enqueued.clear()
    cache.note_end(Ref(PODS.kind, "research", "ada-0"), "uid-ada-0", 2)
    assert SESSION_KEY in enqueued
    assert observe_session(cache, SESSION_KEY, ONE_POD, None).claim_holder is None


def test_the_end_of_the_session_that_holds_the_claim_brings_the_next_one_back_into_the_queue(
    cache: Cache, enqueued: list[Key]
) -> None:
    for session in (by_default("2026-01-02T00:00:00Z"), using("qwen-journal", "ada", "2026-01-01T00:00:00Z")):
        cache.note(session)
    assert observe_session(cache, SESSION_KEY, ONE_POD, None).claim_holder == "ada"
    enqueued.clear()
    cache.note_end(Ref(SESSIONS.kind, "research", "ada"), "uid-ada", 2)
    assert SESSION_KEY in enqueued
    assert observe_session(cache, SESSION_KEY, ONE_POD, None).claim_holder is None


def ray_pod(name: str, application: str, cluster: str = "qwen") -> dict[str, Any]:
    labels = {"tinsmith.dev/session": "qwen", "ray.io/cluster": cluster, "app.kubernetes.io/name": application}
    owners = [{"kind": "RayCluster", "name": cluster, "uid": "rc", "controller": True}]
    return manifest(PODS, name, f"uid-{name}", labels=labels, ownerReferences=owners)


def numbered_pod() -> dict[str, Any]:
    owners = [{"kind": "StatefulSet", "name": "qwen", "uid": "sts", "controller": True}]
    return manifest(PODS, "qwen-0", "uid-0", labels={"tinsmith.dev/session": "qwen"}, ownerReferences=owners)


def test_a_group_has_its_head_for_a_worker_and_the_others_beside_it(cache: Cache) -> None:
    for resource in (WORKLOADS, RAY_CLUSTERS):
        cache.note(manifest(resource, "qwen", f"uid-{resource.kind}"))
    for name, beside in (("a", "-member"), ("b", ""), ("c", "-member")):
        cache.note(ray_pod(name, f"tinsmith-worker{beside}"))
    observed = observe_session(cache, SESSION_KEY, GROUP, None)
    assert observed.workload is not None
    assert observed.workload["kind"] == "RayCluster"
    assert observed.pod is not None
    assert observed.pod["metadata"]["name"] == "b"
    assert [member["metadata"]["name"] for member in observed.members] == ["a", "c"]


def converter(name: str, job: str = "qwen-conversion") -> dict[str, Any]:
    labels = {"tinsmith.dev/session": "qwen", "app.kubernetes.io/name": "tinsmith-conversion"}
    owners = [{"kind": "Job", "name": job, "uid": "job", "controller": True}]
    return manifest(PODS, name, f"uid-{name}", labels=labels, ownerReferences=owners)


@pytest.mark.parametrize("session", [ONE_POD, GROUP], ids=["one", "group"])
def test_what_converts_a_model_is_the_jobs_and_never_the_worker_or_a_member(cache: Cache, session: Any) -> None:
    cache.note(manifest(JOBS, "qwen-conversion", "uid-job"))
    for pod in (converter("qwen-conversion-x"), converter("theirs", job="another-conversion")):
        cache.note(pod)
    observed = observe_session(cache, SESSION_KEY, session, None)
    assert observed.conversion is not None
    assert [pod["metadata"]["name"] for pod in observed.converters] == ["qwen-conversion-x"]
    assert (observed.pod, observed.members) == (None, ())


def test_a_conversion_that_ends_brings_the_session_back_into_the_queue(cache: Cache, enqueued: list[Key]) -> None:
    observe_session(cache, SESSION_KEY, GROUP, None)
    cache.note(manifest(JOBS, "qwen-conversion", "uid-job"))
    assert enqueued == [SESSION_KEY]


def test_pods_of_another_ray_cluster_are_not_the_groups_whatever_label_they_carry(cache: Cache) -> None:
    cache.note(ray_pod("theirs", "tinsmith-worker-member", cluster="theirs"))
    assert observe_session(cache, SESSION_KEY, GROUP, None).members == ()


@pytest.mark.parametrize(
    ("session", "earlier"), [(GROUP, numbered_pod()), (ONE_POD, ray_pod("b", "tinsmith-worker"))], ids=["group", "one"]
)
def test_the_worker_of_an_earlier_session_that_ran_otherwise_is_seen_while_it_is_there(
    cache: Cache, session: Any, earlier: dict[str, Any]
) -> None:
    assert observe_session(cache, SESSION_KEY, session, None).pod is None
    cache.note(earlier)
    assert observe_session(cache, SESSION_KEY, session, None).pod == earlier


def test_a_foreign_pod_of_the_name_that_a_stateful_set_would_use_is_nothing_to_a_group(cache: Cache) -> None:
    cache.note(manifest(PODS, "qwen-0", "theirs", labels={"app": "theirs"}))
    assert observe_session(cache, SESSION_KEY, GROUP, None).pod is None


def test_a_member_that_comes_later_brings_the_session_back_into_the_queue(cache: Cache, enqueued: list[Key]) -> None:
    observe_session(cache, SESSION_KEY, GROUP, None)
    cache.note(ray_pod("a", "tinsmith-worker-member"))
    assert enqueued == [SESSION_KEY]
