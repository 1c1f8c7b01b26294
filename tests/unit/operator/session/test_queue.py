"""A queue such as Kueue says when a session of several pods runs, and where; the operator leaves that to it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.operator.built_sessions import NEMO_RL
from support.operator.group_world import FLAVOUR, TOLERATION, GroupWorld
from support.operator.resources import INSTALLATION, make_session, session_manifest
from tinsmith_operator.api.base import Manifest
from tinsmith_operator.api.names import QUEUE_LABEL
from tinsmith_operator.build.worker import PinnedImage, WorkerPlan
from tinsmith_operator.build.workload import build_workload

DIVIDED: Manifest = {**NEMO_RL, "parallelism": {"nodes": 3}, "modelCache": {"claimName": "models"}}
CLUSTER = ("RayCluster", "qwen")


def queued(**spec: Any) -> GroupWorld:
    """Return a group in a queue, not admitted yet."""
    world = GroupWorld(session_manifest(**{**DIVIDED, **spec}))
    while CLUSTER not in world.objects:
        world.operate()
        world.binder_works()
        world.conversion_works()
    world.queue_takes()
    world.settle()
    return world


def admitted(**spec: Any) -> GroupWorld:
    world = queued(**spec)
    world.queue_admits()
    world.settle()
    return world


def ready(world: GroupWorld) -> Manifest:
    assert world.session is not None
    condition: Manifest = world.session["status"]["conditions"][0]
    return condition


def uid(world: GroupWorld) -> str:
    found: str = world.objects[CLUSTER]["metadata"]["uid"]
    return found


def test_a_session_that_its_queue_keeps_waiting_says_so_and_nothing_is_written() -> None:
    world = queued()
    assert (ready(world)["status"], ready(world)["reason"]) == ("False", "Queued")
    assert "RayCluster qwen is suspended by queue gpus" in ready(world)["message"]
    assert world.decide().actions == ()


def test_the_fields_that_the_queue_adds_on_admission_stay_without_a_conflict() -> None:
    world = admitted()
    assert ready(world)["reason"] == "WorkerReady"
    assert world.decide().actions == ()
    template = world.objects[CLUSTER]["spec"]["headGroupSpec"]["template"]
    assert FLAVOUR.items() <= template["spec"]["nodeSelector"].items()
    assert TOLERATION in template["spec"]["tolerations"]


def test_a_change_of_the_spec_queues_again_and_does_not_change_the_admitted_workload() -> None:
    world = admitted()
    before = uid(world)
    world.user_sets(adapters={"slots": 4, "maxRank": 32})
    world.settle()
    assert uid(world) != before
    world.queue_takes()
    world.settle()
    world.queue_admits()
    world.settle()
    assert ready(world)["reason"] == "WorkerReady"


def test_a_suspended_session_leaves_its_queue_and_takes_a_place_again_when_it_is_resumed() -> None:
    world = admitted()
    world.user_sets(suspend=True)
    world.settle()
    assert CLUSTER not in world.objects
    assert ready(world)["reason"] == "Suspended"
    world.user_sets(suspend=False)
    world.settle()
    assert CLUSTER in world.objects


def test_a_field_of_another_writer_is_left_alone_like_a_field_of_a_queue() -> None:
    world = GroupWorld(session_manifest(**DIVIDED))
    world.settle()
    fields = {"f:spec": {"f:suspend": {}}}
    live = world.objects[CLUSTER]
    live["spec"]["suspend"] = True
    live["metadata"]["managedFields"] = [{"manager": "kubectl-patch", "operation": "Update", "fieldsV1": fields}]
    world.settle()
    assert ready(world)["reason"] == "Queued"
    assert "suspended by field manager kubectl-patch" in ready(world)["message"]
    assert world.objects[CLUSTER]["spec"]["suspend"] is True


def test_a_queue_of_the_installation_is_never_written_into_the_field() -> None:
    installation = replace(INSTALLATION, ray_cluster_labels={QUEUE_LABEL: "gpus"})
    plan = WorkerPlan("claim-uid", PinnedImage("image", None), 1)
    assert "suspend" not in build_workload(make_session(**DIVIDED), installation, plan)["spec"]


STEPS = [
    lambda world: world.operate(),
    lambda world: world.operate(1),
    lambda world: world.controller_works(),
    lambda world: world.kubelet_starts(),
    lambda world: world.kubelet_stops(),
    lambda world: world.queue_takes(),
    lambda world: world.queue_admits(),
    lambda world: world.queue_preempts(),
    lambda world: world.member_is_lost(),
    lambda world: world.user_sets(suspend=True),
    lambda world: world.user_sets(suspend=False),
    lambda world: world.user_sets(adapters={"slots": 4, "maxRank": 32}),
    lambda world: world.person_deletes(CLUSTER),
]


@pytest.mark.parametrize("runs", [True, False], ids=["admitted", "kept waiting"])
@given(life=st.lists(st.sampled_from(STEPS), max_size=25))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_the_operator_comes_to_rest_with_the_queues_last_decision(life: list[Any], runs: bool) -> None:
    world = queued()
    for each in life:
        each(world)
    world.user_sets(suspend=False)
    world.settle(rounds=90)
    world.queue_takes()
    world.queue_admits() if runs else world.queue_preempts()
    world.settle(rounds=90)
    assert world.decide().actions == ()
    assert ready(world)["reason"] == ("WorkerReady" if runs else "Queued")
    assert world.objects[CLUSTER]["spec"]["suspend"] is not runs
