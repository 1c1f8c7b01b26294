"""The journal's claim: made once, grown, annotated, and otherwise left as it is."""

from __future__ import annotations

from typing import Any

import pytest
from support.operator.resources import session_manifest
from support.operator.session_world import World
from tinsmith_operator.api.base import Manifest
from tinsmith_operator.api.names import MANAGER
from tinsmith_operator.common.actions import Apply, Create, Delete, Emit, EventType

CLAIM = ("PersistentVolumeClaim", "qwen-journal")
PLAIN_CLAIM = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "spec": {"volumeName": "disk-1"}}


def settled_world(**storage: object) -> World:
    world = World(session_manifest(storage=storage))
    world.settle()
    return world


def size(world: World) -> str:
    return str(world.objects[CLAIM]["spec"]["resources"]["requests"]["storage"])


def test_the_claim_comes_before_everything_that_needs_its_uid() -> None:
    actions = World(session_manifest()).decide().actions
    kinds = [action.manifest["kind"] for action in actions if isinstance(action, Create)]
    assert kinds[0] == "PersistentVolumeClaim"
    assert "StatefulSet" not in kinds


def test_the_worker_is_named_after_its_claim() -> None:
    world = settled_world()
    uid = world.objects[CLAIM]["metadata"]["uid"]
    assert f"--worker-id={uid}" in world.objects["Pod", "qwen-0"]["spec"]["containers"][0]["args"]
    (certificate,) = world.certificates.values()
    assert certificate.dns_names == (f"{uid}.worker.tinsmith.internal",)


def test_a_claim_gets_its_pod_before_its_file_system_has_grown() -> None:
    """The kubelet resizes it once a pod mounts it, so a pod that waited for the size would never start."""
    world = settled_world(size="10Gi")
    world.user_sets(storage={"size": "20Gi"}, pod={"image": "tinsmith.local/tinsmith/trainer:0.2.0"})
    pending = {"type": "FileSystemResizePending", "status": "True"}
    world.objects[CLAIM].setdefault("status", {})["conditions"] = [pending]
    world.person_deletes(("Pod", "qwen-0"))
    world.settle()
    assert (size(world), world.get("Pod", "qwen-0") is not None) == ("20Gi", True)


@pytest.mark.parametrize("written", ["10Gi", "10240Mi", 10737418240])
def test_another_notation_of_a_size_is_the_same_size(written: str | int) -> None:
    world = settled_world(size="10Gi")
    world.user_sets(storage={"size": written})
    assert [action for action in world.decide().actions if isinstance(action, Apply)] == []


CORRECTIONS: dict[str, tuple[Manifest, Manifest]] = {
    "a size that is too large": ({"size": "999Ti"}, {"size": "10Gi"}),
    "a size that is too small": ({"size": "1Mi"}, {"size": "10Gi"}),
    "a class that is not there": ({"storageClassName": "fats"}, {"storageClassName": "fast"}),
    "a class that is named no more": ({"storageClassName": "fats"}, {}),
    "an access mode": ({"accessMode": "ReadWriteOncePod"}, {"accessMode": "ReadWriteOnce"}),
}


def unbound_world(**storage: object) -> World:
    """Return a world whose claim and pod wait for a volume."""
    world = World(session_manifest(storage=storage))
    for _ in range(4):
        world.operate()
        world.controller_works()
    claim = world.objects[CLAIM]
    claim["metadata"]["managedFields"] = [booked(MANAGER, *claim["spec"])]
    return world


@pytest.mark.parametrize(("wrong", "right"), CORRECTIONS.values(), ids=CORRECTIONS)
def test_a_claim_that_never_had_a_volume_is_created_again_as_the_spec_says_now(
    wrong: Manifest, right: Manifest
) -> None:
    world = unbound_world(**wrong)
    before = world.objects[CLAIM]["metadata"]["uid"]
    world.user_sets(storage=right)
    world.settle()
    claim = world.objects[CLAIM]
    assert claim["metadata"]["uid"] != before
    assert claim["spec"] == unbound_world(**right).objects[CLAIM]["spec"]
    assert f"--worker-id={claim['metadata']['uid']}" in world.objects["Pod", "qwen-0"]["spec"]["containers"][0]["args"]


@pytest.mark.parametrize("bound", [{"status": {"phase": "Bound"}}, {"status": {"phase": "Lost"}}, {"volumeName": "v"}])
def test_a_claim_that_has_or_had_a_volume_is_never_created_again(bound: Manifest) -> None:
    world = unbound_world(size="10Gi", accessMode="ReadWriteOnce")
    claim = world.objects[CLAIM]
    claim["status"] = bound.get("status", claim["status"])
    claim["spec"] |= {name: value for name, value in bound.items() if name != "status"}
    world.user_sets(storage={"size": "5Gi", "accessMode": "ReadWriteOncePod", "storageClassName": "slow"})
    assert [action for action in world.decide().actions if isinstance(action, Delete)] == []


def test_a_claim_that_a_worker_has_mounted_is_never_recreated_for_any_status() -> None:
    world = settled_world(size="10Gi")
    world.objects[CLAIM]["status"] = {"phase": "Pending"}
    world.user_sets(storage={"size": "5Gi"})
    assert [action for action in world.decide().actions if isinstance(action, Delete)] == []


REWRITTEN: dict[str, tuple[Manifest, Manifest]] = {
    "a size that a webhook rounds": ({}, {"resources": {"requests": {"storage": "16Gi"}}}),
    "a class that a webhook replaces": ({"storageClassName": "fast"}, {"storageClassName": "faster"}),
    "a mode that a webhook replaces": ({}, {"accessModes": ["ReadWriteOnce"]}),
    "a size that the API server rounds": (
        {"size": "1073741824.0001"},
        {"resources": {"requests": {"storage": "1073741824001m"}}},
    ),
}


@pytest.mark.parametrize(("storage", "stored"), REWRITTEN.values(), ids=REWRITTEN)
def test_a_claim_that_admission_rewrites_is_made_once_and_again_only_for_another_spec(
    storage: Manifest, stored: Manifest
) -> None:
    world = World(session_manifest(storage=storage))
    world.rewrite = lambda asked: asked["spec"].update(stored) if asked["kind"] == CLAIM[0] else None
    for _ in range(6):
        world.operate()
        world.controller_works()
    assert world.deleted == []
    world.user_sets(storage={**storage, "size": "64Gi"})
    world.operate()
    assert [each["kind"] for each in world.deleted] == [CLAIM[0]]


def test_a_claim_that_gets_its_volume_meanwhile_is_not_deleted() -> None:
    world = unbound_world(size="999Ti")
    world.user_sets(storage={"size": "10Gi"})
    [deletion] = [action for action in world.decide().actions if isinstance(action, Delete)]
    assert deletion.resource_version == world.objects[CLAIM]["metadata"]["resourceVersion"]


@pytest.mark.parametrize(
    ("has", "asks_then"), [("10Gi", "20Gi"), ("20Gi", "100Gi"), ("100Gi", "100Gi"), (None, "100Gi")]
)
def test_a_failed_growth_is_reverted_to_a_size_above_the_volume(has: str | None, asks_then: str) -> None:
    world = settled_world(size="100Gi")
    world.objects[CLAIM]["status"] = {"phase": "Bound", **({"capacity": {"storage": has}} if has else {})}
    world.user_sets(storage={"size": "20Gi"})
    [asked] = [each.manifest for each in applied(world)] or [world.objects[CLAIM]]
    assert asked["spec"]["resources"]["requests"]["storage"] == asks_then


def kept_in_class_fast(**spec: object) -> World:
    """Return a claim of class `fast`, resumed by a session that names no storage class."""
    world = settled_world(storageClassName="fast", size="10Gi")
    world.objects[CLAIM]["spec"]["volumeName"] = "disk-1"
    world.user_deletes_owner()
    world.settle()
    world.objects[CLAIM]["metadata"]["managedFields"] = [
        booked(MANAGER, "accessModes", "resources", "volumeMode", "storageClassName"),
        booked("kube-controller-manager", "volumeName"),
    ]
    world.session = session_manifest(**spec)
    return world


def booked(manager: str, *fields: str) -> Manifest:
    """Return the managed-fields entry that the API server makes for such a write."""
    return {"manager": manager, "operation": "Update", "fieldsV1": {"f:spec": {f"f:{name}": {} for name in fields}}}


@pytest.mark.parametrize(
    "change", [{"pod": {"image": "tinsmith.local/tinsmith/trainer:0.2.0"}}, {"storage": {"size": "20Gi"}}]
)
def test_immutable_fields_of_an_existing_claim_are_not_removed(change: Any) -> None:
    world = kept_in_class_fast(**change)
    before = world.objects[CLAIM]["spec"]
    claims = [each.manifest for each in applied(world) if each.manifest["kind"] == "PersistentVolumeClaim"]
    assert claims
    for claim in claims:
        assert claim["spec"]["storageClassName"] == before["storageClassName"]
        assert "volumeName" not in claim["spec"]


def applied(world: World) -> list[Apply]:
    return [action for action in world.decide().actions if isinstance(action, Apply)]


def test_annotations_and_labels_of_others_stay_on_the_claim() -> None:
    world = settled_world()
    world.objects[CLAIM]["metadata"]["annotations"]["backup.example.com/schedule"] = "daily"
    world.user_sets(pod={"image": "tinsmith.local/tinsmith/trainer:0.2.0"})
    world.settle()
    assert world.objects[CLAIM]["metadata"]["annotations"]["backup.example.com/schedule"] == "daily"


def test_a_claim_that_was_deleted_under_the_session_is_made_again_with_another_worker() -> None:
    world = settled_world()
    before = world.objects[CLAIM]["metadata"]["uid"]
    world.person_deletes(CLAIM)
    world.person_deletes(("Pod", "qwen-0"))
    world.settle()
    assert world.session is not None
    assert world.session["status"]["workerId"] == world.objects[CLAIM]["metadata"]["uid"] != before
    [event] = replaced_journals(world)
    assert (event.type, CLAIM[1] in event.message) == (EventType.WARNING, True)


def replaced_journals(world: World) -> list[Emit]:
    return [event for event in world.events if event.reason == "JournalReplaced"]


def test_a_claim_that_another_client_replaced_is_reported() -> None:
    """A restore or a storage failure does this: the operator never observes the gap."""
    world = World(session_manifest(storage={"existingClaim": "mine"}))
    world.add({**PLAIN_CLAIM, "metadata": {"name": "mine"}})
    world.settle()
    del world.objects["PersistentVolumeClaim", "mine"]
    world.add({**PLAIN_CLAIM, "metadata": {"name": "mine"}})
    world.settle()
    world.settle()
    assert len(replaced_journals(world)) == 1


@pytest.mark.parametrize("label", ["app.kubernetes.io/managed-by", "tinsmith.dev/session"])
def test_a_claim_that_lacks_one_of_our_labels_is_foreign(label: str) -> None:
    world = settled_world()
    world.user_deletes_owner()
    world.settle()
    del world.objects[CLAIM]["metadata"]["labels"][label]
    before = world.get(*CLAIM)
    world.session = session_manifest()
    for _ in range(5):
        world.operate()
    assert world.get(*CLAIM) == before
    assert world.session["status"]["conditions"][0]["reason"] == "NameConflict"


@pytest.mark.parametrize("is_there", [True, False])
def test_a_session_that_names_anothers_claim_waits_and_touches_nothing(is_there: bool) -> None:
    """Two workers on one volume would take each other for one that had been lost."""
    world = World(session_manifest(storage={"existingClaim": "mine"} if is_there else {}))
    if is_there:
        world.add({**PLAIN_CLAIM, "metadata": {"name": "mine"}})
    world.claim_holder = "ada"
    world.settle()
    claims = [place for place in world.objects if place[0] == "PersistentVolumeClaim"]
    assert claims == ([("PersistentVolumeClaim", "mine")] if is_there else [])
    assert all("annotations" not in world.objects[claim]["metadata"] for claim in claims)
    assert world.get("StatefulSet", "qwen") is None
    assert world.session is not None
    ready = world.session["status"]["conditions"][0]
    assert (ready["reason"], "session ada" in ready["message"]) == ("ClaimInUse", True)
    assert "workerId" not in world.session["status"]


def test_a_session_gets_the_claim_when_the_one_before_it_is_gone() -> None:
    world = World(session_manifest(storage={"existingClaim": "mine"}))
    world.add({**PLAIN_CLAIM, "metadata": {"name": "mine"}})
    world.claim_holder = "ada"
    world.settle()
    world.claim_holder = None
    world.settle()
    assert world.session is not None
    assert world.session["status"]["workerId"] == world.objects["PersistentVolumeClaim", "mine"]["metadata"]["uid"]
    assert world.get("Pod", "qwen-0") is not None


def test_the_later_of_two_simultaneously_started_sessions_stops() -> None:
    """Neither had observed the other yet."""
    world = settled_world()
    world.claim_holder = "ada"
    world.settle()
    assert (world.get("StatefulSet", "qwen"), world.get("Pod", "qwen-0")) == (None, None)
    assert world.get(*CLAIM) is not None
    assert world.session is not None
    assert world.session["status"]["conditions"][0]["reason"] == "ClaimInUse"


def test_a_session_that_waits_for_its_claim_leaves_it_behind_when_it_is_deleted() -> None:
    """Another one named it first, whatever the labels say."""
    world = settled_world(storage={"retentionPolicy": {"whenDeleted": "Delete"}})
    claim = world.objects[CLAIM]
    world = World(session_manifest(storage={"retentionPolicy": {"whenDeleted": "Delete"}}))
    world.objects[CLAIM] = claim
    world.claim_holder = "ada"
    world.settle()
    world.user_deletes_owner()
    world.settle()
    assert world.session is None
    assert "deletionTimestamp" not in world.objects[CLAIM]["metadata"]


def test_an_existing_claim_is_only_annotated() -> None:
    world = World(session_manifest(storage={"existingClaim": "mine"}))
    labels = {"team": "a"}
    world.add({**PLAIN_CLAIM, "metadata": {"name": "mine", "labels": labels}})
    world.settle()
    mine = world.objects["PersistentVolumeClaim", "mine"]
    assert (mine["metadata"]["labels"], mine["spec"]) == (labels, {"volumeName": "disk-1"})
    assert set(mine["metadata"]["annotations"]) == {"tinsmith.dev/image", "tinsmith.dev/image-digest"}
