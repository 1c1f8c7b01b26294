"""The observed surroundings of a pool or session; reading subscribes to their changes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.operator.built_sessions import NEMO_RL
from support.operator.resources import NOW, make_pool, make_session
from tinsmith_operator.api.base import format_time
from tinsmith_operator.api.sampler_pool import SamplerPool
from tinsmith_operator.api.training_session import TrainingSession
from tinsmith_operator.common.observed import ReadJournal
from tinsmith_operator.kube.cache import Cache, trimmed
from tinsmith_operator.kube.resources import (
    BUDGETS,
    CLAIMS,
    DEPLOYMENTS,
    JOBS,
    PODS,
    POOLS,
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
WORKER = {"app.kubernetes.io/name": "tinsmith-worker"}
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


def using(claim: str, name: str, created_at: str) -> dict[str, Any]:
    uid = ONE_POD.uid if name == ONE_POD.name else f"uid-{name}"
    session = manifest(SESSIONS, name, uid, creationTimestamp=created_at)
    return session | {"spec": {"storage": {"existingClaim": claim}}}


def by_default(created_at: str) -> dict[str, Any]:
    """Session qwen, with the claim that the operator makes for it."""
    return using("qwen-journal", "qwen", created_at) | {"spec": {}}


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
def test_the_first_session_that_names_a_claim_holds_it(cache: Cache, other: dict[str, Any], holder: str | None) -> None:
    for session in (by_default("2026-01-02T00:00:00Z"), other):
        cache.note(session)
    assert observe_session(cache, SESSION_KEY, ONE_POD, None).claim_holder == holder


def test_a_session_keeps_the_claim_that_its_worker_has(cache: Cache) -> None:
    """The later of two sessions created in the same second may have the smaller UID."""
    cache.note(manifest(CLAIMS, "qwen-journal", "uid-claim"))
    now = "2026-01-02T00:00:00Z"
    for session in (by_default(now), using("qwen-journal", "zoe", now) | {"status": {"workerId": "uid-claim"}}):
        cache.note(session)
    assert observe_session(cache, SESSION_KEY, ONE_POD, None).claim_holder == "zoe"


def test_a_pod_that_outlives_its_session_keeps_the_claim(cache: Cache, enqueued: list[Key]) -> None:
    """The pod ends in its own time, or runs on a silent node: a second one must not write the volume."""
    cache.note(by_default("2026-01-02T00:00:00Z"))
    own, left = numbered_pod(), numbered_pod()
    left["metadata"] |= {"name": "ada-0", "uid": "uid-ada-0", "labels": WORKER | {"tinsmith.dev/session": "ada"}}
    left["metadata"]["ownerReferences"][0]["name"] = "ada"
    for pod in (own, left):
        cache.note(pod | mounting("journal", "qwen-journal"))
    assert observe_session(cache, SESSION_KEY, ONE_POD, None).claim_holder == "ada"
    enqueued.clear()
    cache.note_end(Ref(PODS.kind, "research", "ada-0"), "uid-ada-0", 2)
    assert SESSION_KEY in enqueued
    assert observe_session(cache, SESSION_KEY, ONE_POD, None).claim_holder is None


def mounting(volume: str, claim: str, **how: Any) -> dict[str, Any]:
    """Return the spec of a pod that mounts this claim."""
    source = {"claimName": claim, **how}
    return {"spec": {"volumes": [{"name": "tmp", "emptyDir": {}}, {"name": volume, "persistentVolumeClaim": source}]}}


@pytest.mark.parametrize(
    "others",
    [
        mounting("models", "qwen-journal", readOnly=True),
        mounting("model-cache", "qwen-journal"),
        mounting("checkpoints", "qwen-journal"),
        mounting("journal", "qwen-journal", readOnly=True),
    ],
    ids=["a model", "a cache", "checkpoints", "a model under a borrowed name"],
)
def test_a_pod_that_merely_mounts_the_claim_of_a_journal_stops_no_session(cache: Cache, others: dict[str, Any]) -> None:
    cache.note(by_default("2026-01-02T00:00:00Z"))
    other_pod = numbered_pod()
    other_pod["metadata"] |= {"name": "ada-0", "uid": "uid-ada-0", "labels": WORKER | {"tinsmith.dev/session": "ada"}}
    other_pod["metadata"]["ownerReferences"][0]["name"] = "ada"
    cache.note(other_pod | others)
    assert observe_session(cache, SESSION_KEY, ONE_POD, None).claim_holder is None


@pytest.mark.parametrize(
    "metadata",
    [
        {"labels": {"tinsmith.dev/session": "ada", "app.kubernetes.io/name": "tinsmith-conversion"}},
        {"labels": WORKER | {"tinsmith.dev/session": "ada"}, "ownerReferences": [{"kind": "Job", "name": "ada"}]},
        {"labels": WORKER | {"tinsmith.dev/session": "ada"}, "ownerReferences": [{"kind": "StatefulSet", "name": "x"}]},
        {"labels": {"app": "theirs"}},
    ],
    ids=["a conversion", "a job with our labels", "another StatefulSet with our labels", "a stranger"],
)
def test_a_pod_that_ran_no_worker_stops_no_session_under_any_name_of_its_volume(
    cache: Cache, metadata: dict[str, Any]
) -> None:
    cache.note(by_default("2026-01-02T00:00:00Z"))
    for owner in metadata.get("ownerReferences", ()):
        owner |= {"uid": "theirs", "controller": True}
    cache.note(manifest(PODS, "theirs", "uid-theirs", **metadata) | mounting("journal", "qwen-journal"))
    assert observe_session(cache, SESSION_KEY, ONE_POD, None).claim_holder is None


def reading(kind: Resource, name: str, created_at: str, **spec: Any) -> dict[str, Any]:
    owner = manifest(kind, name, f"uid-{name}", creationTimestamp=created_at)
    return owner | {"spec": {"model": {"source": {"type": "Hub"}}, **spec}}


def on_claim(claim: str) -> dict[str, Any]:
    return {"type": "PersistentVolumeClaim", "persistentVolumeClaim": {"claimName": claim}}


ON_DATA = on_claim("data")
EARLY, LATE = "2026-01-01T00:00:00Z", "2026-01-03T00:00:00Z"
READERS = [
    (SESSIONS, {"model": {"source": ON_DATA}}),
    (SESSIONS, {"modelCache": {"claimName": "data"}}),
    (POOLS, {"model": {"source": ON_DATA}}),
]


@pytest.mark.parametrize(("kind", "spec"), READERS, ids=["model", "cache", "pool"])
@pytest.mark.parametrize("created_at", [EARLY, LATE])
def test_a_reader_of_a_claim_stops_no_worker_that_has_begun_and_no_session_with_its_own_claim(
    cache: Cache, kind: Resource, spec: dict[str, Any], created_at: str
) -> None:
    cache.note(manifest(CLAIMS, "data", "uid-data"))
    begun = make_session(storage={"existingClaim": "data"})
    begun = replace(begun, status=begun.status.model_copy(update={"worker_id": "uid-data"}))
    own = replace(ONE_POD, name="data")
    cache.note(reading(kind, "ada", created_at, **spec))
    observed = observe_session(cache, SESSION_KEY, begun, None)
    assert (observed.claim_holder, observed.claim_reader) == (None, None)
    cache.note(reading(kind, "eve", created_at, model={"source": on_claim("data-journal")}))
    observed = observe_session(cache, SESSION_KEY, own, None)
    assert (observed.claim_holder, observed.claim_reader) == (None, None)


@pytest.mark.parametrize(("kind", "spec"), READERS, ids=["model", "cache", "pool"])
def test_a_claim_that_others_read_from_already_is_no_place_for_a_new_journal(
    cache: Cache, enqueued: list[Key], kind: Resource, spec: dict[str, Any]
) -> None:
    """Otherwise a session that names the shared volume of models for its journal would stop every reader."""
    session = make_session(storage={"existingClaim": "data"})
    cache.note(reading(kind, "ada", LATE, **spec))
    assert observe_session(cache, SESSION_KEY, session, None).claim_reader is None
    cache.note(reading(kind, "eve", EARLY, **spec))
    assert enqueued.count(SESSION_KEY) > 0
    noun = "pool" if kind is POOLS else "session"
    assert observe_session(cache, SESSION_KEY, session, None).claim_reader == f"{noun} eve"


FIELD = "spec.model.source.persistentVolumeClaim.claimName"


def read_journal_of(cache: Cache, owner: TrainingSession | SamplerPool) -> ReadJournal | None:
    if isinstance(owner, SamplerPool):
        return observe_pool(cache, KEY, owner, None).read_journal
    return observe_session(cache, SESSION_KEY, owner, None).read_journal


@pytest.mark.parametrize("owner", [make_session(source=ON_DATA), make_pool(source=ON_DATA)], ids=["session", "pool"])
def test_a_model_on_the_journal_of_an_earlier_session_is_seen_until_that_is_gone(
    cache: Cache, enqueued: list[Key], owner: TrainingSession | SamplerPool
) -> None:
    cache.note(using("data", "ada", EARLY))
    assert read_journal_of(cache, owner) == ReadJournal(FIELD, "data", "ada")
    enqueued.clear()
    cache.note_end(Ref(SESSIONS.kind, "research", "ada"), "uid-ada", 2)
    assert (KEY if isinstance(owner, SamplerPool) else SESSION_KEY) in enqueued
    assert read_journal_of(cache, owner) is None


def test_a_model_cache_on_the_journal_of_an_earlier_session_is_seen(cache: Cache) -> None:
    cache.note(using("models", "ada", EARLY))
    session = replace(GROUP, spec=GROUP.spec.model_copy(update={"model": make_session(source=ON_DATA).spec.model}))
    assert read_journal_of(cache, session) == ReadJournal("spec.modelCache.claimName", "models", "ada")


def test_a_later_session_that_names_the_volume_of_a_model_as_its_journal_takes_no_model_away(cache: Cache) -> None:
    cache.note(using("data", "eve", LATE))
    assert read_journal_of(cache, make_session(source=ON_DATA)) is None


def test_a_session_may_read_a_model_from_its_own_journal(cache: Cache) -> None:
    session = make_session(source=ON_DATA, storage={"existingClaim": "data"})
    cache.note(using("data", "qwen", EARLY))
    assert read_journal_of(cache, session) is None


def test_the_first_of_two_sessions_that_read_each_others_journal_continues(cache: Cache) -> None:
    first = make_session("first", source=on_claim("second-data"), storage={"existingClaim": "first-data"})
    second = make_session("second", source=on_claim("first-data"), storage={"existingClaim": "second-data"})
    first, second = replace(first, uid="uid-first"), replace(second, uid="uid-second")
    for name, other in (("first", "second"), ("second", "first")):
        spec = {"storage": {"existingClaim": f"{name}-data"}, "model": {"source": on_claim(f"{other}-data")}}
        cache.note(reading(SESSIONS, name, format_time(NOW), **spec))
    seen = observe_session(cache, Key("research", "first", "TrainingSession"), first, None)
    assert (seen.claim_reader, seen.read_journal) == (None, None)
    seen = observe_session(cache, Key("research", "second", "TrainingSession"), second, None)
    assert (seen.claim_reader, seen.read_journal) == ("session first", ReadJournal(FIELD, "first-data", "first"))


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


def test_the_head_of_a_group_is_its_worker_and_the_other_pods_are_members(cache: Cache) -> None:
    for resource in (WORKLOADS, RAY_CLUSTERS):
        cache.note(manifest(resource, "qwen", f"uid-{resource.kind}"))
    for name, suffix in (("a", "-member"), ("b", ""), ("c", "-member")):
        cache.note(ray_pod(name, f"tinsmith-worker{suffix}"))
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
def test_a_conversion_pod_is_never_observed_as_a_worker_or_a_member(cache: Cache, session: Any) -> None:
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


def test_pods_of_another_ray_cluster_are_not_the_groups_with_any_label(cache: Cache) -> None:
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
    assert observe_session(cache, SESSION_KEY, session, None).pod == trimmed(earlier)


def test_a_foreign_pod_of_the_name_that_a_stateful_set_would_use_is_nothing_to_a_group(cache: Cache) -> None:
    cache.note(manifest(PODS, "qwen-0", "theirs", labels={"app": "theirs"}))
    assert observe_session(cache, SESSION_KEY, GROUP, None).pod is None


def test_a_member_that_comes_later_brings_the_session_back_into_the_queue(cache: Cache, enqueued: list[Key]) -> None:
    observe_session(cache, SESSION_KEY, GROUP, None)
    cache.note(ray_pod("a", "tinsmith-worker-member"))
    assert enqueued == [SESSION_KEY]
