"""The Job that converts a session's model: before the first pod, once, and again only where the result would differ."""

from __future__ import annotations

import json
from copy import deepcopy
from datetime import timedelta
from typing import Any

import pytest
from support.operator.built_sessions import MILES, NEMO_RL
from support.operator.group_world import GroupWorld
from support.operator.resources import FROM_HUB, session_manifest
from support.operator.session_world import World
from tinsmith_operator.api.base import Manifest, format_time
from tinsmith_operator.api.names import RESTART_REQUEST_ANNOTATION
from tinsmith_operator.common.actions import Create

JOB = ("Job", "qwen-conversion")
NEW_IMAGE = {"pod": {"image": "tinsmith.local/tinsmith/trainer-nemo-rl:0.2.0"}}
CACHE = {"modelCache": {"claimName": "models"}}


def one_pod(**spec: Any) -> World:
    return World(session_manifest(**{**NEMO_RL, **CACHE, **spec}))


def several_pods(**spec: Any) -> World:
    return GroupWorld(session_manifest(**{**NEMO_RL, **CACHE, "parallelism": {"nodes": 3}, **spec}))


KINDS = pytest.mark.parametrize("make", [one_pod, several_pods])


def converting(world: World | None = None) -> World:
    """Return a world whose Job has a pending pod with an allowed image."""
    world = world or one_pod()
    world.change_installation(allowed_images=("*", "tinsmith.local/tinsmith/*"))
    for _ in range(6):
        world.operate()
        world.binder_works()
    world.job_controller_works()
    world.operate()
    return world


def settled(world: World) -> World:
    world.settle()
    return world


def ready_condition(world: World) -> tuple[str, str]:
    world.operate()
    assert world.session is not None
    ready = world.session["status"]["conditions"][0]
    return ready["reason"], ready["message"]


def uid_of(world: World, place: tuple[str, str] = JOB) -> str:
    uid: str = world.objects[place]["metadata"]["uid"]
    return uid


def converter(world: World) -> Manifest:
    return world.converters()[-1]


def runs(world: World) -> None:
    converter(world)["spec"]["nodeName"] = "node-1"
    world._set_container(converter(world), {"running": {"startedAt": format_time(world.now)}}, ready=True)


@KINDS
def test_no_workload_is_created_before_the_model_is_converted(make: Any) -> None:
    world = converting(make())
    assert JOB in world.objects
    assert (world.workload_kind, "qwen") not in world.objects
    world.conversion_works()
    world.operate()
    world.operate()
    assert (world.workload_kind, "qwen") in world.objects


@pytest.mark.parametrize(
    "spec",
    [{}, NEMO_RL, {**MILES, "source": FROM_HUB, **CACHE}],
    ids=["an engine of one process", "no cache", "ranks that read the files as they are"],
)
def test_without_another_format_to_keep_there_is_nothing_to_convert_before(spec: Manifest) -> None:
    world = settled(World(session_manifest(**spec)))
    assert JOB not in world.objects
    assert ready_condition(world)[0] == "WorkerReady"


def test_a_model_that_is_converted_is_not_converted_again_for_any_start() -> None:
    world = settled(one_pod())
    before = uid_of(world)
    world.user_sets(adapters={"slots": 4})
    world.settle()
    world.user_sets(suspend=True)
    world.settle()
    world.user_sets(suspend=False)
    world.settle()
    assert ready_condition(world)[0] == "WorkerReady"
    assert uid_of(world) == before


@KINDS
@pytest.mark.parametrize("change", [NEW_IMAGE, {"modelCache": {"claimName": "larger"}}], ids=["image", "cache"])
def test_another_image_or_cache_means_another_conversion_in_place_of_the_one_before(
    make: Any, change: Manifest
) -> None:
    world = settled(make())
    before = uid_of(world)
    world.user_sets(suspend=True, **change)
    world.settle(rounds=90)
    world.user_sets(suspend=False)
    world.settle(rounds=90)
    assert ready_condition(world)[0] == "WorkerReady"
    assert uid_of(world) != before


def test_another_image_is_not_converted_with_while_the_old_one_runs() -> None:
    world = settled(one_pod())
    world.user_sets(**NEW_IMAGE)
    world.operate()
    assert not [action for action in world.decide().actions if isinstance(action, Create)]
    world.settle(rounds=90)
    assert ready_condition(world)[0] == "WorkerReady"
    [container] = world.objects[JOB]["spec"]["template"]["spec"]["containers"]
    assert container["image"] == NEW_IMAGE["pod"]["image"]


def test_a_worker_that_runs_is_not_stopped_because_its_job_is_gone() -> None:
    """An earlier operator started such a worker without any Job."""
    world = settled(one_pod())
    pod = uid_of(world, ("Pod", "qwen-0"))
    world.person_deletes(JOB)
    world.settle()
    assert uid_of(world, ("Pod", "qwen-0")) == pod
    assert JOB not in world.objects


def test_a_suspended_session_stops_a_running_conversion_and_keeps_a_finished_one() -> None:
    world = converting()
    world.user_sets(suspend=True)
    world.operate()
    world.collector_works()
    assert JOB not in world.objects
    assert ready_condition(world)[0] == "Suspending"
    world.converters_stop()
    assert ready_condition(world)[0] == "Suspended"
    done = settled(one_pod())
    done.user_sets(suspend=True)
    done.settle()
    assert JOB in done.objects
    assert ready_condition(done)[0] == "Suspended"


def test_a_failed_job_is_reported_with_its_last_message_and_retried_on_request() -> None:
    world = converting()
    record = {"reason": "ModelInvalid", "message": "config.json is not there."}
    for _ in range(8):
        world.conversion_ends("Failed", exitCode=1, message=json.dumps(record))
        world.job_controller_works()
    reason, message = ready_condition(world)
    assert reason == "ConversionFailed"
    assert message.startswith(
        "Job qwen-conversion failed too often. Its last try: config.json is not there. Correct what the message names"
    )
    before = uid_of(world)
    world.user_annotates(RESTART_REQUEST_ANNOTATION, "2026-01-31T12:00:00Z")
    world.settle()
    assert uid_of(world) != before
    assert ready_condition(world)[0] == "WorkerReady"


def test_a_failed_attempt_is_reported_while_the_next_one_runs() -> None:
    world = converting()
    world.conversion_ends("Failed", exitCode=1, message=json.dumps({"reason": "CannotStart", "message": "no room."}))
    assert ready_condition(world) == (
        "ConvertingModel",
        "Try 1 of Job qwen-conversion failed, and the Job tries again. The failed try: no room.",
    )
    world.job_controller_works()
    runs(world)
    assert "no room" in ready_condition(world)[1]
    world.time_passes(timedelta(seconds=61))
    assert "converts the model into the model cache on node node-1" in ready_condition(world)[1]


def test_a_missing_model_is_reported_as_by_a_worker() -> None:
    world = converting()
    record = {"reason": "ModelNotFound", "message": "There is no model at /models/qwen."}
    world.conversion_ends("Failed", exitCode=1, message=json.dumps(record))
    reason, message = ready_condition(world)
    assert reason == "ModelNotFound"
    assert "There is no model at /models/qwen" in message


@pytest.mark.parametrize(
    ("terminated", "says"),
    [
        (
            {"exitCode": 137, "reason": "OOMKilled"},
            "it was killed because it used more memory than spec.resources gives",
        ),
        ({"exitCode": 3}, "ended with status 3; read kubectl logs qwen-conversion"),
        ({"exitCode": 3, "message": "[" * 4000}, "ended with status 3 and said: [[[["),
    ],
    ids=["memory", "no words", "words of another form"],
)
def test_an_end_without_a_termination_message_is_described_by_its_exit(terminated: Manifest, says: str) -> None:
    world = converting()
    world.conversion_ends("Failed", **terminated)
    assert says in ready_condition(world)[1]


def test_an_untrusted_image_is_reported_with_its_exit_and_where_its_log_is() -> None:
    world = converting()
    world.change_installation(allowed_images=("*",))
    record = {"reason": "ModelNotFound", "message": "hf_abcdefghijkl"}
    world.conversion_ends("Failed", exitCode=3, message=json.dumps(record))
    reason, message = ready_condition(world)
    assert reason == "ModelNotFound"
    assert "it ended with status 3; read kubectl logs qwen-conversion" in message
    assert "hf_" not in message


def scheduled(status: str, message: str = "") -> Manifest:
    return {"type": "PodScheduled", "status": status, "reason": "Unschedulable", "message": message}


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        ({}, "WaitingForScheduler"),
        ({"conditions": [scheduled("False", "0/3 nodes are available: 3 Insufficient memory.")]}, "Unschedulable"),
        ({"conditions": [scheduled("False", 'persistentvolumeclaim "models" not found')]}, "ClaimMissing"),
        (
            {
                "conditions": [scheduled("True")],
                "containerStatuses": [{"name": "worker", "state": {"waiting": {"reason": "ImagePullBackOff"}}}],
            },
            "ImagePullFailed",
        ),
        ({"conditions": [scheduled("True")]}, "PreparingPod"),
    ],
)
def test_a_problem_of_its_pod_is_reported_like_a_problem_of_a_worker(status: Manifest, reason: str) -> None:
    world = converting()
    converter(world)["status"] = status
    assert ready_condition(world)[0] == reason


def test_a_job_that_another_controller_suspends_is_reported_and_left_alone() -> None:
    """A job queue suspends Jobs in this way."""
    world = converting()
    for pod in world.converters():
        del world.objects["Pod", pod["metadata"]["name"]]
    world.objects[JOB]["spec"]["suspend"] = True
    assert ready_condition(world)[0] == "Queued"
    assert ready_condition(world)[1].startswith("Job qwen-conversion is suspended")
    assert world.decide().actions == ()


def test_the_pod_of_an_earlier_job_on_a_lost_node_is_not_reported_for_the_next_job() -> None:
    world = converting()
    runs(world)
    left = deepcopy(converter(world))
    left["metadata"] |= {"name": "qwen-conversion-old", "uid": "old", "ownerReferences": [{"uid": "the Job before"}]}
    left["status"]["conditions"] = [{"type": "Ready", "status": "False"}, {"type": "ContainersReady", "status": "True"}]
    world.objects["Pod", "qwen-conversion-old"] = left
    assert ready_condition(world)[0] == "ConvertingModel"


def test_a_pod_of_an_earlier_session_that_ends_does_not_stand_for_a_conversion() -> None:
    before = one_pod()
    before.settle()
    world = one_pod()
    ending = deepcopy(before.objects["Pod", "qwen-0"])
    ending["metadata"]["deletionTimestamp"] = format_time(world.now)
    world.objects["Pod", "qwen-0"] = ending
    converting(world)
    assert JOB in world.objects
    assert ("StatefulSet", "qwen") not in world.objects


def test_a_foreign_job_of_that_name_is_left_alone_and_told() -> None:
    world = one_pod()
    foreign_job = world.add({"kind": "Job", "metadata": {"name": JOB[1]}, "spec": {}})
    for _ in range(8):
        world.operate()
    assert world.objects[JOB] == foreign_job
    assert ready_condition(world)[0] == "NameConflict"


def test_nothing_is_converted_for_a_group_that_could_not_run() -> None:
    world = GroupWorld(session_manifest(**{**NEMO_RL, **CACHE, "parallelism": {"nodes": 3}}))
    world.kuberay = False
    world.settle()
    assert JOB not in world.objects
    assert ready_condition(world)[0] == "KubeRayMissing"


def test_an_operator_that_dies_at_any_action_makes_one_job() -> None:
    for cut in range(8):
        world = one_pod()
        for _ in range(3):
            world.operate(cut)
        made = settled(world)
        assert [place for place in made.objects if place[0] == "Job"] == [JOB]
        assert [job for job in made.deleted if job["kind"] == "Job"] == []
