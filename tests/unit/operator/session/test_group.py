"""A session of several pods: they are one group, whichever of them is lost, changed or missing."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from support.operator.built_sessions import MILES, NEMO_RL
from support.operator.group_world import GroupWorld
from support.operator.resources import session_manifest
from support.operator.session_world import World
from tinsmith_operator.api.base import Manifest
from tinsmith_operator.common.actions import Create, Delete
from tinsmith_operator.common.observed import KubernetesWarning

HEAD = "qwen-head-x7k2p"


def a_world(**spec: Any) -> GroupWorld:
    divided: Manifest = {**NEMO_RL, "parallelism": {"nodes": 3}, "modelCache": {"claimName": "models"}}
    return GroupWorld(session_manifest(**{**divided, **spec}))


@pytest.fixture(params=[{}, {**MILES, "modelCache": None}], ids=["nemo-rl", "miles"])
def world(request: pytest.FixtureRequest) -> GroupWorld:
    """Return a world that serves."""
    world = a_world(**request.param)
    world.settle()
    assert ready(world)["reason"] == "WorkerReady"
    return world


def ready(world: World) -> Manifest:
    assert world.session is not None
    condition: Manifest = world.session["status"]["conditions"][0]
    return condition


def deletions(world: World) -> list[Delete]:
    return [action for action in world.decide().actions if isinstance(action, Delete)]


def uids(world: GroupWorld) -> set[str]:
    """Return the UIDs of the group's pods."""
    pods = [pod for place, pod in world.objects.items() if place[0] == "Pod" and pod not in world.converters()]
    return {pod["metadata"]["uid"] for pod in pods}


def members(world: GroupWorld) -> set[str]:
    return {member["metadata"]["uid"] for member in world.members()}


def test_a_worker_that_begins_again_gets_members_again_and_keeps_its_pod(world: GroupWorld) -> None:
    before, head = members(world), world.objects["Pod", HEAD]["metadata"]["uid"]
    world.container_ends(exit_code=1)
    assert {deletion.uid for deletion in deletions(world)} == before
    world.settle()
    assert ready(world)["reason"] == "WorkerReady"
    assert world.objects["Pod", HEAD]["metadata"]["uid"] == head
    assert members(world).isdisjoint(before)


def test_a_lost_member_ends_the_run_of_all(world: GroupWorld) -> None:
    before = members(world)
    world.member_is_lost()
    world.settle()
    assert ready(world)["reason"] == "WorkerReady"
    assert members(world).isdisjoint(before)


def test_a_member_that_came_after_the_run_began_is_not_taken_for_one_of_the_run_before(world: GroupWorld) -> None:
    world.member_is_lost()
    world.controller_works()
    [_, newest] = sorted(members(world), key=lambda uid: int(uid.removeprefix("uid-")))
    assert newest not in {deletion.uid for deletion in deletions(world)}


def test_a_change_of_the_spec_stops_all_pods_and_members_by_their_own_grace(world: GroupWorld) -> None:
    all_uids = uids(world)
    world.user_sets(adapters={"slots": 4, "maxRank": 32})
    world.operate()
    stopped = deletions(world)
    assert {deletion.uid for deletion in stopped} == all_uids
    assert [deletion.grace_period_seconds for deletion in stopped] == [300, None, None]


def test_without_kuberay_the_session_says_how_to_get_it_and_asks_for_nothing() -> None:
    world = a_world()
    world.kuberay = False
    world.settle()
    assert ready(world)["reason"] == "KubeRayMissing"
    assert "helm install kuberay-operator" in ready(world)["message"]
    assert ("RayCluster", "qwen") not in world.objects
    world.kuberay = True
    world.settle()
    assert ready(world)["reason"] == "WorkerReady"


def test_while_pods_are_missing_it_says_how_many_run(world: GroupWorld) -> None:
    [lost, _] = world.members()
    del lost["status"]
    world.container_ends(exit_code=1)
    head = world.objects["Pod", HEAD]
    world._set_container(head, {"running": {"startedAt": "2026-01-02T03:04:05Z"}}, ready=False)
    world.time_passes(timedelta(minutes=5))
    world.operate()
    assert ready(world)["reason"] == "WaitingForMembers"
    assert "2 of 3 pods are running" in ready(world)["message"]


def test_a_member_for_which_there_is_no_room_says_what_the_scheduler_says(world: GroupWorld) -> None:
    [lost, _] = world.members()
    words = "0/2 nodes are available: 2 Insufficient nvidia.com/gpu."
    del lost["spec"]["nodeName"]
    unschedulable = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": words}
    lost["status"] = {"conditions": [unschedulable]}
    world._set_container(world.objects["Pod", HEAD], {"running": {"startedAt": "2026-01-02T03:04:05Z"}}, ready=False)
    world.operate()
    assert ready(world)["reason"] == "Unschedulable"
    assert "2 of 3 pods are running" in ready(world)["message"]
    assert "Insufficient nvidia.com/gpu" in ready(world)["message"]


def test_a_pod_that_kuberay_may_not_create_is_reported_with_the_message_of_kuberay() -> None:
    world = a_world()
    for _ in range(5):
        world.operate()
        world.binder_works()
        world.conversion_works()
    uid = world.objects["RayCluster", "qwen"]["metadata"]["uid"]
    words = 'pods "qwen-head-" is forbidden: exceeded quota: compute'
    world.warnings.append(KubernetesWarning("RayCluster", uid, "FailedToCreateHeadPod", words, world.now))
    world.operate()
    assert ready(world)["reason"] == "QuotaExceeded"
    assert "exceeded quota" in ready(world)["message"]


def test_pods_that_nothing_keeps_any_more_are_stopped_for_kuberay_would_take_them_for_its_own(
    world: GroupWorld,
) -> None:
    orphans = uids(world)
    del world.objects["RayCluster", "qwen"]
    for place, pod in world.objects.items():
        if place[0] == "Pod":
            del pod["metadata"]["ownerReferences"]
    assert {deletion.uid for deletion in deletions(world)} == orphans


def test_no_group_is_made_while_the_pod_of_an_earlier_session_of_the_name_may_still_write() -> None:
    world = a_world()
    world.operate()
    world.binder_works()
    owner = {"kind": "StatefulSet", "name": "qwen", "uid": "earlier", "controller": True}
    labels = {"tinsmith.dev/session": "qwen"}
    metadata = {"name": HEAD, "labels": labels, "ownerReferences": [owner]}
    world.add({"kind": "Pod", "metadata": metadata, "spec": {"containers": []}, "status": {}})
    assert not [each for each in world.decide().actions if isinstance(each, Create)]
    del world.objects["Pod", HEAD]
    world.settle()
    assert ready(world)["reason"] == "WorkerReady"
