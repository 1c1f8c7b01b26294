"""A pool's conditions: whether it can sample, and what keeps it from its spec."""

from __future__ import annotations

import copy
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from support.operator.pool_world import PoolWorld
from support.operator.resources import pool_manifest
from tinsmith_operator.api.base import Manifest, format_time
from tinsmith_operator.common.actions import Delete, EventType, WriteStatus
from tinsmith_operator.pool.decision import decide_pool

BROKEN = "tinsmith.local/tinsmith/trainer:broken"


def settled_world(**spec: Any) -> PoolWorld:
    world = PoolWorld(pool_manifest(**spec))
    world.settle()
    return world


def conditions_of(world: PoolWorld) -> dict[str, tuple[str, str]]:
    assert world.owner is not None
    return {each["type"]: (each["status"], each["reason"]) for each in world.owner["status"]["conditions"]}


def message(world: PoolWorld, type_: str) -> str:
    assert world.owner is not None
    [found] = [each["message"] for each in world.owner["status"]["conditions"] if each["type"] == type_]
    return str(found)


def test_a_pool_with_all_its_replicas_is_ready_and_has_nothing_left_to_do() -> None:
    assert conditions_of(settled_world(replicas=2)) == {
        "Ready": ("True", "ReplicasReady"),
        "Reconciling": ("False", "AsWanted"),
        "Stalled": ("False", "AsWanted"),
        "Degraded": ("False", "AsExpected"),
        "UpgradeAvailable": ("False", "ImageCurrent"),
    }


def test_autoscalers_find_the_replicas_and_their_selector_in_the_status() -> None:
    world = settled_world(replicas=2)
    assert world.owner is not None
    status = world.owner["status"]
    assert (status["replicas"], status["readyReplicas"], status["updatedReplicas"]) == (2, 2, 2)
    assert status["selector"] == "app.kubernetes.io/name=tinsmith-sampler,tinsmith.dev/pool=qwen"


def test_while_replicas_are_added_the_pool_is_ready_and_says_how_many_are_missing() -> None:
    world = settled_world(replicas=1)
    world.user_sets(replicas=3)
    world.operate()
    world.controller_works()
    world.operate()
    assert conditions_of(world)["Ready"] == ("True", "ReplicasReady")
    assert conditions_of(world)["Reconciling"] == conditions_of(world)["Degraded"] == ("True", "WaitingForScheduler")
    assert message(world, "Degraded").startswith("1 of 3 replicas are ready, and 2 are up to date; pod qwen-")
    assert [each.type for each in world.events if each.reason == "WaitingForScheduler"][-1] is EventType.NORMAL


def test_an_image_that_cannot_be_pulled_stalls_the_roll_and_leaves_the_old_replicas_at_work() -> None:
    world = settled_world(replicas=2)
    world.broken_images = {BROKEN}
    world.user_sets(pod={"image": BROKEN})
    world.settle()
    assert conditions_of(world)["Ready"] == ("True", "ReplicasReady")
    assert conditions_of(world)["Stalled"] == conditions_of(world)["Degraded"] == ("True", "ImagePullFailed")
    assert len([pod for pod in world.pods() if pod["spec"]["containers"][0]["image"] != BROKEN]) == 2


def test_a_pool_says_why_its_only_replica_cannot_start() -> None:
    world = PoolWorld(pool_manifest())
    world.broken_images = {world.installation.trainer_image}
    world.settle()
    assert conditions_of(world)["Ready"] == ("False", "ImagePullFailed")
    assert conditions_of(world)["Stalled"] == ("True", "ImagePullFailed")


def test_the_worst_replica_speaks_for_all() -> None:
    world = PoolWorld(pool_manifest(replicas=2))
    for _ in range(3):
        world.operate()
        world.controller_works()
    world.a_model_is_missing()
    world.operate()
    assert conditions_of(world)["Ready"] == ("False", "ModelNotFound")
    assert "nothing in /models/qwen" in message(world, "Ready")


def failed_pods(world: PoolWorld, reason: str, *, hours_ago: int = 0) -> None:
    """Six, as a ReplicaSet leaves them; the one that works has gone."""
    [works] = world.pods()
    for number in range(6):
        pod = copy.deepcopy(works)
        pod["metadata"] |= {"name": f"failed-{number}", "uid": f"failed-{number}"}
        created = world.now - timedelta(hours=hours_ago, seconds=6 - number)
        pod["metadata"]["creationTimestamp"] = format_time(created)
        pod["status"] = {"phase": "Failed", "reason": reason, "message": "Allocate failed: no healthy devices"}
        world.objects["Pod", pod["metadata"]["name"]] = pod
    del world.objects["Pod", works["metadata"]["name"]]
    world.objects["Deployment", "qwen-sampler"]["status"]["readyReplicas"] = 0


def test_the_latest_of_the_pods_that_no_node_admits_is_quoted_and_most_others_are_removed() -> None:
    world = settled_world(replicas=1)
    failed_pods(world, "UnexpectedAdmissionError")
    world.operate()
    assert conditions_of(world)["Ready"] == ("False", "NodeRefusesPod")
    assert "A pod on node node-1 failed: UnexpectedAdmissionError: Allocate failed" in message(world, "Ready")
    left = [pod["metadata"]["name"] for pod in world.pods() if "deletionTimestamp" not in pod["metadata"]]
    assert left == ["failed-3", "failed-4", "failed-5"]


def test_another_pod_with_the_same_failure_writes_no_status() -> None:
    """Such pods can fail every second."""
    world = settled_world(replicas=1)
    failed_pods(world, "UnexpectedAdmissionError")
    world.operate()
    another = copy.deepcopy(world.objects["Pod", "failed-5"])
    another["metadata"] |= {"name": "failed-6", "uid": "failed-6", "creationTimestamp": format_time(world.now)}
    world.objects["Pod", "failed-6"] = another
    assert [type(action) for action in world.decide().actions] == [Delete]


@pytest.mark.parametrize(("reason", "hours_ago"), [("Evicted", 0), ("UnexpectedAdmissionError", 1)])
def test_failures_that_are_over_are_not_told_and_are_removed(reason: str, hours_ago: int) -> None:
    world = settled_world(replicas=1)
    failed_pods(world, reason, hours_ago=hours_ago)
    world.operate()
    assert conditions_of(world)["Ready"] == ("False", "RollingOut")
    assert len([pod for pod in world.pods() if "deletionTimestamp" not in pod["metadata"]]) == 3


def refused(kind: str, message: str, replicas: int) -> list[Manifest]:
    """Return the conditions of a pool whose object of this kind is refused."""
    world = settled_world(replicas=replicas)
    world.person_deletes((kind, "qwen-sampler"))
    observed = replace(world.observe(), refusals={kind: message})
    [status] = [
        action.status
        for action in decide_pool(observed, world.installation, world.now).actions
        if isinstance(action, WriteStatus)
    ]
    conditions: list[Manifest] = status["conditions"]
    return conditions


@pytest.mark.parametrize("replicas", [0, 1])
@pytest.mark.parametrize(
    ("kind", "reason"), [("Deployment", "OverridesRefused"), ("PodDisruptionBudget", "ObjectRefused")]
)
def test_an_object_that_is_refused_is_quoted(kind: str, reason: str, replicas: int) -> None:
    [stalled] = [each for each in refused(kind, "spec.x: Invalid value", replicas) if each["type"] == "Stalled"]
    assert (stalled["status"], stalled["reason"]) == ("True", reason)
    assert "spec.x: Invalid value" in stalled["message"]


def test_a_pool_is_checked_again_soon_while_something_is_missing_and_else_when_its_certificate_is_due() -> None:
    world = settled_world()
    assert (world.decide().requeue_after_seconds or 0) > 24 * 3600
    world.a_pod_crashes()
    world.objects["Deployment", "qwen-sampler"]["status"]["readyReplicas"] = 0
    assert (world.decide().requeue_after_seconds or 0) <= 20
