"""Orphaned children are adopted by the next owner of the name, and no session restarts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.operator.group_world import GroupWorld
from support.operator.model_cluster import ModelCluster, Place
from support.operator.pool_world import PoolWorld
from support.operator.resources import pool_manifest, session_manifest
from support.operator.session_world import World
from tinsmith_operator.api.names import MANAGED_BY_LABEL, POOL_LABEL, SESSION_LABEL

DIVIDED = {"engine": "nemo-rl", "parallelism": {"nodes": 3}, "resources": {"limits": {"nvidia.com/gpu": "8"}}}
WORLDS = pytest.mark.parametrize(
    "make",
    [
        lambda: World(session_manifest()),
        lambda: GroupWorld(session_manifest(**DIVIDED)),
        lambda: PoolWorld(pool_manifest(replicas=2)),
    ],
    ids=["session", "session of several nodes", "pool"],
)


def children(world: ModelCluster) -> dict[Place, list[str]]:
    """Return the owners of all objects with Tinsmith's labels, except claims and pods."""
    return {
        place: [owner["uid"] for owner in live["metadata"].get("ownerReferences", [])]
        for place, live in world.objects.items()
        if place[0] not in ("PersistentVolumeClaim", "Pod", "ReplicaSet")
        and live["metadata"].get("labels", {}).get(MANAGED_BY_LABEL)
    }


def pods(world: ModelCluster) -> set[str]:
    return {live["metadata"]["uid"] for place, live in world.objects.items() if place[0] == "Pod"}


@WORLDS
def test_orphaned_children_are_adopted_and_no_worker_is_restarted(make: Callable[[], ModelCluster]) -> None:
    world = make()
    world.settle()
    before = pods(world)
    world.user_replaces_owner_and_orphans_its_children()
    assert {uid for owners in children(world).values() for uid in owners} == set()
    world.settle()
    assert world.owner is not None
    assert {tuple(owners) for owners in children(world).values()} == {(world.owner["metadata"]["uid"],)}
    # A sampler's certificate names its pool by UID, so a pool replaces its replicas.
    assert pods(world) == before or isinstance(world, PoolWorld)
    ready, *_ = world.owner["status"]["conditions"]
    assert ready["status"] == "True"


@WORLDS
@pytest.mark.parametrize("label", [MANAGED_BY_LABEL, SESSION_LABEL, POOL_LABEL])
def test_an_orphan_without_the_operators_labels_is_foreign(make: Callable[[], ModelCluster], label: str) -> None:
    world = make()
    world.settle()
    world.user_replaces_owner_and_orphans_its_children()
    place = next(place for place in children(world) if place[0] == "Service")
    labels = world.objects[place]["metadata"]["labels"]
    if labels.pop(label, None) is None:
        return
    for _ in range(8):
        world.operate()
    assert world.objects[place]["metadata"]["ownerReferences"] == []
    assert world.owner is not None
    assert world.owner["status"]["conditions"][0]["reason"] == "NameConflict"


def test_a_job_that_was_left_behind_is_created_again_since_a_job_is_never_changed() -> None:
    world = World(session_manifest())
    world.settle()
    world.unpullable_images = {"registry.test/trainer:2"}
    world.user_sets(pod={"image": "registry.test/trainer:2"})
    world.settle()
    job = ("Job", "qwen-image-pull")
    before = world.objects[job]["metadata"]["uid"]
    world.user_replaces_owner_and_orphans_its_children()
    world.settle()
    assert world.owner is not None
    assert world.objects[job]["metadata"]["uid"] != before
    assert world.objects[job]["metadata"]["ownerReferences"][0]["uid"] == world.owner["metadata"]["uid"]
