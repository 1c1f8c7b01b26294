"""The cases in which the operator deletes the worker's pod."""

from __future__ import annotations

from datetime import timedelta

import pytest
from support.operator.resources import NOW, session_manifest
from support.operator.session_world import World
from tinsmith_operator.common.actions import Action, Delete

POD = ("Pod", "qwen-0")


def settled_world() -> World:
    world = World(session_manifest())
    world.settle()
    return world


def deleted_pods(actions: tuple[Action, ...]) -> list[Delete]:
    return [action for action in actions if isinstance(action, Delete) and action.kind == "Pod"]


def restarts(world: World) -> dict[str, int]:
    assert world.session is not None
    counts = world.session["status"]["restarts"]
    return {cause: counts[cause] for cause in ("crash", "outOfMemory", "hang")}


def test_a_change_of_the_spec_replaces_the_pod_once_its_template_is_known() -> None:
    world = settled_world()
    uid = world.objects[POD]["metadata"]["uid"]
    world.user_sets(adapters={"slots": 4})
    assert deleted_pods(world.operate()) == []
    assert deleted_pods(world.operate()) == []
    world.controller_works()
    (deletion,) = deleted_pods(world.operate())
    assert (deletion.uid, deletion.grace_period_seconds) == (uid, 60)
    assert deleted_pods(world.operate()) == []


def test_a_new_template_of_a_newer_operator_waits_for_the_next_start() -> None:
    world = settled_world()
    template = world.objects["StatefulSet", "qwen"]["spec"]["template"]
    template["spec"]["enableServiceLinks"] = True  # as an older operator had it
    world.settle()
    assert world.objects["StatefulSet", "qwen"]["spec"]["template"]["spec"]["enableServiceLinks"] is False
    assert world.deleted == []


def test_a_longer_time_to_stop_waits_for_the_next_start() -> None:
    world = settled_world()
    world.worker_reports()
    assert world.report is not None
    world.slow_snapshots(seconds=200)
    world.settle()
    template = world.objects["StatefulSet", "qwen"]["spec"]["template"]["spec"]
    assert template["terminationGracePeriodSeconds"] == 840
    assert world.deleted == []


@pytest.mark.parametrize(
    ("measured", "kept"), [(100.0, 100), (60.0, 100), (50.0, 100), (49.0, 49), (100.2, 101)], ids=str
)
def test_the_time_of_a_snapshot_grows_at_once_and_shrinks_by_halves(measured: float, kept: int) -> None:
    world = settled_world()
    world.worker_reports()
    for seconds in (100.0, measured):
        world.slow_snapshots(seconds)
        world.settle()
    assert world.session is not None
    assert world.session["status"]["snapshotSeconds"] == kept


def test_a_hung_worker_is_replaced_and_counted_once() -> None:
    world = settled_world()
    world.worker_reports(running_seconds=601)
    world.operate(most_actions=1)  # the status is written, the pod not yet deleted
    assert len(deleted_pods(world.operate())) == 1
    world.settle()
    assert restarts(world) == {"crash": 0, "outOfMemory": 0, "hang": 1}


def test_a_pod_on_a_silent_node_is_never_deleted_by_force() -> None:
    world = settled_world()
    for condition in world.objects[POD]["status"]["conditions"]:
        if condition["type"] == "Ready":
            condition["status"] = "False"
    world.operate()
    assert world.decide().actions == ()
    world.person_deletes(POD)
    world.time_passes(timedelta(days=1))
    world.operate()
    assert deleted_pods(world.operate()) == []
    assert POD in world.objects


@pytest.mark.parametrize(
    ("exit_code", "reason", "counted"),
    [(1, "Error", "crash"), (137, "OOMKilled", "outOfMemory"), (0, "Completed", None)],
    ids=["crash", "out of memory", "a clean end"],
)
def test_restarts_are_counted_once_by_cause(exit_code: int, reason: str, counted: str | None) -> None:
    world = settled_world()
    world.container_ends(exit_code=exit_code, reason=reason)
    world.operate()
    world.operate()
    world.settle()
    assert restarts(world) == {cause: int(cause == counted) for cause in ("crash", "outOfMemory", "hang")}


def test_a_session_is_requeued_before_an_overdue_pod_is_reported() -> None:
    world = settled_world()
    world.person_deletes(POD)
    world.operate()
    seconds = world.decide().requeue_after_seconds
    assert world.now == NOW
    assert seconds is not None
    assert seconds <= 120
