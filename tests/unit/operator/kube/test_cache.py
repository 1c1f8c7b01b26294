from __future__ import annotations

import json
import weakref
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tinsmith_operator.api.names import MANAGED_BY_LABEL, MANAGER
from tinsmith_operator.kube.cache import SEEN_FOR_THEIR_NAMES, Cache
from tinsmith_operator.kube.resources import (
    BY_KIND,
    CLAIMS,
    DEPLOYMENTS,
    PODS,
    POOLS,
    SECRETS,
    SERVICES,
    SESSIONS,
    Group,
    Key,
    Ref,
    Resource,
)

KEY = Key("tin", "tiny", "TrainingSession")


def listed(cache: Cache, resource: Resource, shown: list[dict[str, Any]], version: int) -> None:
    """Apply a whole list of the namespace, in one page."""
    cache.drop_unlisted(resource, "tin", cache.note_listed(shown, version), version)


def manifest(
    resource: Resource, name: str = "tiny", *, uid: str = "u1", version: int = 1, **labels: str
) -> dict[str, Any]:
    metadata = {"name": name, "namespace": "tin", "uid": uid, "resourceVersion": str(version), "labels": labels}
    return {"apiVersion": resource.api_version, "kind": resource.kind, "metadata": metadata}


def place(resource: Resource, name: str = "tiny") -> Ref:
    return Ref(resource.kind, "tin", name)


@pytest.fixture
def enqueued() -> list[Key]:
    return []


@pytest.fixture
def cache(enqueued: list[Key]) -> Cache:
    return Cache(enqueued.append)


def test_a_session_that_changes_is_enqueued(cache: Cache, enqueued: list[Key]) -> None:
    cache.note(manifest(SESSIONS))
    assert enqueued == [KEY]


@pytest.mark.parametrize(
    ("status", "labels", "is_enqueued"),
    [
        ({"model": "tiny", "progress": {"models": 1}}, {}, False),
        ({"model": "tiny", "progress": {"models": 1}}, {"team": "a"}, True),
        ({"model": "large", "progress": {"models": 1}}, {}, True),
        ({"model": "tiny"}, {}, True),
    ],
    ids=["progress alone", "with a label", "with the other status", "nothing"],
)
def test_a_change_of_the_progress_alone_enqueues_no_one(
    cache: Cache, enqueued: list[Key], status: dict[str, Any], labels: dict[str, str], is_enqueued: bool
) -> None:
    cache.note({**manifest(SESSIONS), "status": {"model": "tiny"}})
    enqueued.clear()
    assert cache.note({**manifest(SESSIONS, version=2, **labels), "status": status})
    assert enqueued == [KEY] * is_enqueued
    latest = cache.peek(place(SESSIONS))
    assert latest is not None
    assert (latest["metadata"]["resourceVersion"], latest["status"]) == ("2", status)


def test_a_change_enqueues_every_reader_of_the_place_even_if_it_was_empty(cache: Cache, enqueued: list[Key]) -> None:
    assert cache.read(place(SERVICES), KEY) is None
    cache.note(manifest(SERVICES))
    cache.note(manifest(SERVICES, "of-another-owner"))
    assert enqueued == [KEY]


def test_a_reader_that_is_forgotten_hears_no_more(cache: Cache, enqueued: list[Key]) -> None:
    cache.read(place(SERVICES), KEY)
    cache.forget_reader(KEY)
    cache.note(manifest(SERVICES))
    assert enqueued == []


@pytest.mark.parametrize("version", [4, 5], ids=["older", "the same"])
def test_an_event_from_before_our_own_write_changes_nothing(cache: Cache, enqueued: list[Key], version: int) -> None:
    written = manifest(SERVICES, version=5)
    cache.note(written)
    cache.read(place(SERVICES), KEY)
    assert not cache.note(manifest(SERVICES, version=version))
    assert cache.peek(place(SERVICES)) == written
    assert enqueued == []


def test_an_object_that_ended_does_not_come_back_by_a_late_answer(cache: Cache, enqueued: list[Key]) -> None:
    cache.note(manifest(SERVICES, version=5))
    cache.note_end(place(SERVICES), "u1", version=8)
    cache.note(manifest(SERVICES, version=7))
    assert cache.peek(place(SERVICES)) is None
    assert cache.note(manifest(SERVICES, uid="u2", version=9))


def test_the_end_of_an_object_does_not_concern_its_successor(cache: Cache) -> None:
    successor = manifest(SERVICES, uid="u2", version=9)
    cache.note(successor)
    cache.note_end(place(SERVICES), "u1", version=8)
    assert cache.peek(place(SERVICES)) == successor


@pytest.mark.parametrize("resource", [SESSIONS, POOLS, SERVICES, CLAIMS, SECRETS])
def test_an_object_in_a_later_list_has_not_ended(cache: Cache, resource: Resource) -> None:
    living = manifest(resource, version=5, **{MANAGED_BY_LABEL: MANAGER})
    cache.note_end(place(resource), "u1", version=6)
    listed(cache, resource, [living], 20)
    assert cache.peek(place(resource)) is not None
    assert cache.note({**living, "metadata": {**living["metadata"], "resourceVersion": "21"}})


def test_an_object_that_a_newer_list_lacks_is_removed_and_its_readers_are_enqueued(
    cache: Cache, enqueued: list[Key]
) -> None:
    cache.note(manifest(SERVICES, version=5))
    cache.note(manifest(SERVICES, "kept", uid="u2", version=6))
    cache.read(place(SERVICES), KEY)
    listed(cache, SERVICES, [manifest(SERVICES, "kept", uid="u2", version=6)], 20)
    assert cache.peek(place(SERVICES)) is None
    assert cache.peek(place(SERVICES, "kept")) is not None
    assert enqueued == [KEY]


def test_objects_written_after_the_list_are_kept(cache: Cache) -> None:
    cache.note(manifest(SERVICES, version=21))
    listed(cache, SERVICES, [], 20)
    assert cache.peek(place(SERVICES)) is not None


def test_an_object_that_lost_the_label_we_watch_can_be_read_in_again(cache: Cache) -> None:
    """The watch says DELETED at the version of that change, and the object lives on at it."""
    cache.note(manifest(SECRETS, version=5, **{MANAGED_BY_LABEL: MANAGER}))
    cache.note_end(place(SECRETS), "u1", version=8)
    assert cache.note(manifest(SECRETS, version=8))


def test_unwatched_objects_survive_a_list_and_are_dropped_on_request(cache: Cache, enqueued: list[Key]) -> None:
    cache.note(manifest(SECRETS, version=5))
    cache.read(place(SECRETS), KEY)
    listed(cache, SECRETS, [], 20)
    assert cache.peek(place(SECRETS)) is not None
    cache.drop_if_unwatched(place(SECRETS))
    assert cache.peek(place(SECRETS)) is None
    assert enqueued == [KEY]


OF_A_POOL = {"tinsmith.dev/pool": "tiny", MANAGED_BY_LABEL: MANAGER}
PODS_OF_THE_POOL = Group(PODS.kind, "tin", "tinsmith.dev/pool", "tiny")


def names(found: list[dict[str, Any]]) -> list[str]:
    return [each["metadata"]["name"] for each in found]


def test_a_group_has_the_objects_with_the_label_by_name(cache: Cache) -> None:
    cache.note(manifest(PODS, "b", uid="u2", **OF_A_POOL))
    cache.note(manifest(PODS, "a", uid="u1", **OF_A_POOL))
    cache.note(manifest(PODS, "of-another", uid="u3", **{"tinsmith.dev/pool": "other"}))
    cache.note(manifest(SERVICES, "no-pod", uid="u4", **OF_A_POOL))
    elsewhere = manifest(PODS, "elsewhere", uid="u5", **OF_A_POOL)
    elsewhere["metadata"]["namespace"] = "another"
    cache.note(elsewhere)
    assert names(cache.read_group(PODS_OF_THE_POOL, KEY)) == ["a", "b"]


def test_a_reader_of_a_group_hears_of_new_changed_and_deleted_objects(cache: Cache, enqueued: list[Key]) -> None:
    assert cache.read_group(PODS_OF_THE_POOL, KEY) == []
    cache.note(manifest(PODS, "unowned"))
    assert enqueued == []
    cache.note(manifest(PODS, "a", uid="u1", version=2, **OF_A_POOL))
    cache.note(manifest(PODS, "a", uid="u1", version=3, **OF_A_POOL))
    cache.note_end(place(PODS, "a"), "u1", 4)
    assert enqueued == [KEY] * 3


LABELS = st.dictionaries(
    st.sampled_from(["tinsmith.dev/pool", "tinsmith.dev/session", MANAGED_BY_LABEL, "app"]),
    st.sampled_from(["tiny", "small", MANAGER]),
)
CHANGES = st.lists(
    st.tuples(
        st.sampled_from(["note", "end", "replace", "drop"]),
        st.sampled_from([PODS, SERVICES]),
        st.sampled_from(["a", "b", "c"]),
        LABELS,
    ),
    max_size=25,
)


@given(changes=CHANGES)
def test_a_group_equals_a_search_of_all_objects(changes: list[tuple[str, Resource, str, Any]]) -> None:
    cache = Cache(lambda _: None)
    for version, (change, resource, name, labels) in enumerate(changes, start=1):
        ref, shown = place(resource, name), manifest(resource, name, uid=name, version=version, **labels)
        match change:
            case "note":
                cache.note(shown)
            case "end":
                cache.note_end(ref, name, version)
            case "replace":
                listed(cache, resource, [shown], version)
            case "drop":
                cache.drop_if_unwatched(ref)
        for kind in (PODS.kind, SERVICES.kind):
            for label in ("tinsmith.dev/pool", "tinsmith.dev/session"):
                for value in ("tiny", "small"):
                    scan = [each for each in cache.of_kind(kind) if each["metadata"]["labels"].get(label) == value]
                    assert names(cache.read_group(Group(kind, "tin", label, value), KEY)) == sorted(names(scan))


def test_a_group_by_a_label_that_is_not_followed_is_refused_and_not_empty(cache: Cache) -> None:
    with pytest.raises(AssertionError, match="not grouped by app"):
        cache.read_group(Group(PODS.kind, "tin", "app", "tiny"), KEY)


def large(resource: Resource, **labels: str) -> dict[str, Any]:
    """Return a large object as kubectl applies it."""
    body = manifest(resource, **labels) | {"spec": {"much": "x" * 50_000}, "status": {"replicas": 3}}
    body["metadata"]["managedFields"] = [{"manager": "kubectl", "fieldsV1": {"f:spec": {"f:much": {}}}}]
    body["metadata"]["annotations"] = {"kubectl.kubernetes.io/last-applied-configuration": json.dumps(body["spec"])}
    body["metadata"]["generation"] = 7
    return body


@pytest.mark.parametrize("kind", sorted(SEEN_FOR_THEIR_NAMES))
def test_only_the_owner_of_a_foreign_object_is_kept(cache: Cache, kind: str) -> None:
    resource = BY_KIND[kind]
    foreign = large(resource, app="web")
    foreign["metadata"]["ownerReferences"] = [
        {"apiVersion": "apps/v1", "kind": "Other", "uid": "o", "controller": True}
    ]
    cache.note(foreign)
    kept = cache.peek(place(resource))
    assert kept is not None
    assert len(json.dumps(kept)) < 500
    assert kept.keys() == {"apiVersion", "kind", "metadata"}
    large_ones = {"managedFields", "annotations"}
    assert kept["metadata"] == {name: it for name, it in foreign["metadata"].items() if name not in large_ones}


@pytest.mark.parametrize("resource", [SESSIONS, POOLS], ids=lambda resource: resource.kind)
def test_sessions_and_pools_are_cached_without_managed_fields(cache: Cache, resource: Resource) -> None:
    cache.note(large(resource))
    whole = large(resource)
    del whole["metadata"]["managedFields"]
    assert cache.peek(place(resource)) == whole


def test_the_cache_keeps_the_annotations_of_the_operator_on_a_foreign_claim(cache: Cache) -> None:
    """A session may keep its journal there, and the claim remembers the image."""
    foreign = large(CLAIMS)
    foreign["metadata"]["annotations"]["tinsmith.dev/image"] = "trainer:1"
    own_entry = {"manager": MANAGER, "operation": "Apply", "fieldsV1": {"f:metadata": {}}}
    foreign["metadata"]["managedFields"].append(own_entry)
    cache.note(foreign)
    kept = cache.peek(place(CLAIMS))
    assert kept is not None
    assert kept["metadata"]["annotations"] == {"tinsmith.dev/image": "trainer:1"}
    assert kept["metadata"]["managedFields"] == [own_entry]
    assert kept["metadata"]["uid"] == foreign["metadata"]["uid"]


def test_a_claim_of_the_operator_is_kept_whole(cache: Cache) -> None:
    cache.note(large(CLAIMS, **{MANAGED_BY_LABEL: MANAGER}))
    assert cache.peek(place(CLAIMS)) == large(CLAIMS, **{MANAGED_BY_LABEL: MANAGER})


def test_the_managed_fields_of_a_child_are_cached_as_the_names_of_its_managers_fields(cache: Cache) -> None:
    child = large(SERVICES, **{MANAGED_BY_LABEL: MANAGER})
    template = {"f:template": {"f:spec": {"f:containers": {"k:{}": {"f:image": {}}}}}}
    child["metadata"]["managedFields"] = [
        {"manager": MANAGER, "operation": "Update", "time": "2026-01-02T03:04:05Z", "fieldsV1": {"f:spec": template}},
        {"manager": "controller", "operation": "Update", "subresource": "status", "fieldsV1": {"f:status": {}}},
    ]
    cache.note(child)
    kept = cache.peek(place(SERVICES))
    assert kept is not None
    summary = {"manager": MANAGER, "operation": "Update", "fieldsV1": {"f:spec": {"f:template": {}}}}
    assert kept["metadata"]["managedFields"] == [summary]
    assert kept["spec"] == child["spec"]


def test_objects_in_the_cache_share_their_texts(cache: Cache) -> None:
    texts = [json.loads('{"some-name": "some-value"}') for _ in range(2)]
    kept = []
    for number, spec in enumerate(texts):
        cache.note({**manifest(SECRETS, f"s{number}", uid=f"u{number}"), "data": spec})
        kept.append(cache.peek(place(SECRETS, f"s{number}")))
    [first, second] = [next(iter(each["data"].items())) for each in kept if each is not None]
    assert all(one is other for one, other in zip(first, second, strict=True))


def test_the_cache_keeps_the_arguments_and_the_status_of_a_pod(cache: Cache) -> None:
    pod = large(PODS)
    pod["metadata"]["annotations"]["tinsmith.dev/inputs"] = "abc"
    journal = {"name": "journal", "persistentVolumeClaim": {"claimName": "tiny-journal"}}
    container = {"name": "worker", "image": "trainer:1", "args": ["--volume=/journal", "--image=trainer:1"]}
    secrets = [{"name": "registry"}]
    pod["spec"] |= {
        "nodeName": "node-1",
        "imagePullSecrets": secrets,
        "containers": [{**container, "env": [{"name": "TOKEN", "value": "x" * 10_000}]}],
        "volumes": [journal, {"name": "tmp", "emptyDir": {}}],
    }
    pod["status"] = {"phase": "Running", "conditions": [], "containerStatuses": [{"name": "worker"}], "podIPs": []}
    cache.note(pod)
    kept = cache.peek(place(PODS))
    assert kept is not None
    assert kept["metadata"]["annotations"] == {"tinsmith.dev/inputs": "abc"}
    assert "managedFields" not in kept["metadata"]
    assert kept["spec"] == {
        "nodeName": "node-1",
        "imagePullSecrets": secrets,
        "containers": [{"name": "worker", "image": "trainer:1", "args": ["--image=trainer:1"]}],
        "volumes": [journal],
    }
    assert kept["status"] == {"phase": "Running", "conditions": [], "containerStatuses": [{"name": "worker"}]}


def test_a_child_that_lost_our_label_or_its_owner_is_kept_whole(cache: Cache) -> None:
    labelled, owned = large(DEPLOYMENTS, **{MANAGED_BY_LABEL: MANAGER}), large(SERVICES)
    owner = {"apiVersion": "tinsmith.dev/v1alpha1", "kind": "SamplerPool", "uid": "p", "controller": True}
    owned["metadata"]["ownerReferences"] = [owner]
    cache.note(labelled)
    cache.note(owned)
    assert cache.peek(place(DEPLOYMENTS)) == labelled
    assert cache.peek(place(SERVICES)) == owned


def test_a_derived_value_is_cached_for_one_version_of_its_object(cache: Cache) -> None:
    asked: list[str] = []

    def say(shown: dict[str, Any]) -> str:
        asked.append(shown["metadata"]["resourceVersion"])
        return f"version {asked[-1]}"

    for version in (5, 5, 6):
        cache.note(manifest(SERVICES, uid="u1", version=version))
        assert [cache.derive(place(SERVICES), say) for _ in range(2)] == [f"version {version}"] * 2
    assert asked == ["5", "6"]


class Saying:
    """Something that is seen to be gone."""

    def __init__(self, shown: dict[str, Any]) -> None:
        self.uid = shown["metadata"]["uid"]


def test_a_derived_value_is_removed_with_its_object(cache: Cache) -> None:
    cache.note(manifest(SERVICES, uid="u1", version=5))
    said = weakref.ref(cast(Saying, cache.derive(place(SERVICES), Saying)))
    assert said() is not None
    cache.note_end(place(SERVICES), "u1", 6)
    assert said() is None
    assert cache.derive(place(SERVICES), Saying) is None
    cache.note(manifest(SERVICES, uid="u2", version=7))
    assert cast(Saying, cache.derive(place(SERVICES), Saying)).uid == "u2"
