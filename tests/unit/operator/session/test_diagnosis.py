"""The reason why a session is not ready: one reason, and a sentence with the facts and the next step."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

import pytest
from support.operator.pod_states import (
    NO_GPU,
    POD,
    conditions,
    container,
    ended,
    ready_world,
    refused,
    starting_world,
    unscheduled,
    waiting,
    warn,
)
from support.operator.resources import session_manifest
from support.operator.session_world import World
from tinsmith_operator.api.base import Manifest, format_time
from tinsmith_operator.common.observed import WorkerReport
from tinsmith_operator.session.decision import decide


@pytest.mark.parametrize(
    ("status", "reason", "quote"),
    [
        (unscheduled(NO_GPU), "Unschedulable", "3 Insufficient nvidia.com/gpu"),
        (unscheduled('persistentvolumeclaim "models" not found'), "ClaimMissing", '"models"'),
        (unscheduled('persistentvolumeclaim "qwen-journal" is being deleted'), "ClaimTerminating", "being deleted"),
        (unscheduled("pod has unbound immediate PersistentVolumeClaims"), "ClaimUnbound", "unbound"),
        ({}, "WaitingForScheduler", "is waiting for the scheduler"),
        (waiting("ContainerCreating"), "PreparingPod", "node-1"),
        (waiting("ImagePullBackOff", "Back-off pulling image"), "ImagePullFailed", "Back-off pulling image"),
        (waiting("ErrImagePull", "not found"), "ImagePullFailed", "tinsmith.local/tinsmith/trainer:0.1.0"),
        (waiting("InvalidImageName"), "ImagePullFailed", "InvalidImageName"),
        (waiting("CreateContainerConfigError", 'secret "hub" not found'), "SecretMissing", '"hub"'),
        (waiting("CreateContainerConfigError", "couldn't find key t in Secret n/hub"), "SecretMissing", "key t"),
        (waiting("RunContainerError", "no such device"), "CannotStart", "no such device"),
        (refused("ModelNotFound"), "ModelNotFound", "No model in /models/qwen"),
        (refused("ModelInvalid"), "ModelInvalid", "Put one there"),
        (refused("ModelCannotLoad"), "ModelCannotLoad", "Put one there"),
        (refused("ModelChanged"), "ModelChanged", "Put one there"),
        (refused("VolumeUnsuitable", "It is NFS."), "VolumeUnsuitable", "It is NFS"),
        (refused("TlsInvalid"), "TlsInvalid", "Put one there"),
        (refused("CannotStart", "Out of luck."), "CannotStart", "Out of luck"),
        (ended(137, "OOMKilled"), "OutOfMemory", "more memory than its limit"),
        (ended(1, record={"reason": "OutOfMemory", "message": "No memory."}), "OutOfMemory", "No memory"),
        (ended(1), "CrashLoop", "status 1"),
        (container({"running": {"startedAt": "2026-01-02T03:00:00Z"}}), "LoadingModel", "node-1"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_pod_says_why_it_is_not_ready(status: Manifest, reason: str, quote: str) -> None:
    scheduled = bool(status.get("containerStatuses"))
    ready = conditions(starting_world(status, node="node-1" if scheduled else None))["Ready"]
    assert (ready.status, ready.reason) == ("False", reason)
    assert quote in ready.message


NESTED = "[" * 4000
"""As long as the kubelet lets a termination message be, and too deep for a parser that calls itself."""


@pytest.mark.parametrize(
    ("words", "quote"),
    [
        (NESTED, "[[[["),
        ('{"reason":' * 400, '{"reason":{"reason":'),
        (json.dumps({"reason": "ModelNotFound", "message": ["not", "a", "sentence"]}), '["not", "a", "sentence"]'),
        ("Killed by the sidecar.\nGood bye.", "Killed by the sidecar. Good bye"),
        ("\x1b[31mred\x7f\x00", "\N{REPLACEMENT CHARACTER}[31mred"),
    ],
    ids=["lists in lists", "cut off in the middle", "a record of another form", "text", "control characters"],
)
def test_a_termination_message_of_an_unknown_form_is_quoted_as_text_and_cut(words: str, quote: str) -> None:
    status = ended(1)
    status["containerStatuses"][0]["lastState"]["terminated"]["message"] = words
    ready = conditions(starting_world(status, "node-1"))["Ready"]
    assert (ready.reason, quote in ready.message) == ("CrashLoop", True)
    assert "ended with status 1, after 3 restarts of this pod, and said:" in ready.message
    assert len(ready.message) < 1000
    assert ready.message.isprintable()


def test_a_refusal_with_half_a_character_is_reported_without_that_character() -> None:
    """JSON can escape half of a pair, which is no character: no status could hold it."""
    ready = conditions(starting_world(refused("ModelNotFound", "No model in /models/\ud800."), "node-1"))["Ready"]
    assert ready.reason == "ModelNotFound"
    assert "No model in /models/\N{REPLACEMENT CHARACTER}" in ready.message


def test_a_stuck_session_is_stalled_and_a_moving_one_reconciles() -> None:
    stuck = conditions(starting_world(refused("ModelNotFound"), "node-1"))
    moving = conditions(starting_world(unscheduled(NO_GPU)))
    assert (stuck["Stalled"].status, stuck["Reconciling"].status) == ("True", "False")
    assert (moving["Stalled"].status, moving["Reconciling"].status) == ("False", "True")


def test_a_refusal_is_remembered_while_the_next_try_has_only_just_begun() -> None:
    world = starting_world(refused("ModelNotFound"), "node-1")
    status = world.objects[POD]["status"]["containerStatuses"][0]
    status["state"] = {"running": {"startedAt": format_time(world.now)}}
    assert conditions(world)["Ready"].reason == "ModelNotFound"
    assert world.decide().requeue_after_seconds == 20
    world.time_passes(timedelta(seconds=60))
    assert conditions(world)["Ready"].reason == "LoadingModel"


@pytest.mark.parametrize(
    "message",
    [
        "0/2 nodes are available: 2 node(s) had volume node affinity conflict.",
        "0/1 nodes are available: 1 node(s) didn't match PersistentVolume's node affinity.",
        "0/2 nodes are available: 1 node(s) had untolerated taint {node.kubernetes.io/unreachable: }, "
        "1 node(s) didn't match PersistentVolume's node affinity.",
        "0/3 nodes are available: 2 node(s) didn't match PersistentVolume's node affinity, "
        "1 node(s) had untolerated taint(s). no new claims to deallocate, preemption: 0/3 nodes are available: "
        "3 Preemption is not helpful for scheduling.",
    ],
    ids=["all that are there are others", "as of 1.34", "its node does not answer", "its node has a taint, as of 1.34"],
)
def test_a_volume_on_a_lost_node_is_recognized(message: str) -> None:
    found = conditions(starting_world(unscheduled(message)))
    assert found["Ready"].reason == found["Degraded"].reason == "VolumeOnLostNode"
    assert found["Degraded"].status == "True"
    assert "latest checkpoints" in found["Ready"].message


@pytest.mark.parametrize("others", ["1 Insufficient cpu", "1 Insufficient cpu, 1 node(s) had untolerated taint(s)"])
def test_a_volume_is_not_lost_when_its_node_may_merely_be_full(others: str) -> None:
    nodes = 1 + len(others.split(", "))
    message = f"0/{nodes} nodes are available: {others}, 1 node(s) didn't match PersistentVolume's node affinity."
    assert conditions(starting_world(unscheduled(message)))["Ready"].reason == "Unschedulable"


def test_an_old_warning_and_one_about_another_object_say_nothing() -> None:
    world = starting_world()
    del world.objects[POD]
    warn(world, ("StatefulSet", "qwen"), "FailedCreate", "exceeded quota", age_minutes=21)
    warn(world, ("Service", "qwen"), "FailedCreate", "exceeded quota")
    assert conditions(world)["Ready"].reason == "CreatingObjects"


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ('MountVolume.SetUp failed for volume "x" : secret "keys" not found', "SecretMissing"),
        ('MountVolume.MountDevice failed for volume "pv" : timed out', "MountFailed"),
    ],
)
def test_a_volume_that_cannot_be_mounted_is_explained_by_the_pods_warning(message: str, reason: str) -> None:
    world = starting_world(waiting("ContainerCreating"), "node-1")
    warn(world, POD, "FailedMount", message)
    assert conditions(world)["Ready"].reason == reason


def test_a_claim_that_gets_no_volume_quotes_the_provisioner() -> None:
    world = starting_world(unscheduled("pod has unbound immediate PersistentVolumeClaims"))
    warn(world, ("PersistentVolumeClaim", "qwen-journal"), "ProvisioningFailed", 'storageclass "fast" not found')
    assert 'storageclass "fast" not found' in conditions(world)["Ready"].message


def test_an_existing_claim_that_is_not_there_is_named() -> None:
    ready = conditions(World(session_manifest(storage={"existingClaim": "mine"})))["Ready"]
    assert (ready.reason, "mine" in ready.message) == ("ClaimMissing", True)


def test_a_claim_from_before_that_differs_is_left_alone_and_explained() -> None:
    world = ready_world()
    world.user_deletes_owner()
    world.settle()
    world.session = session_manifest(storage={"storageClassName": "fast", "accessMode": "ReadWriteOnce"})
    before = world.get("PersistentVolumeClaim", "qwen-journal")
    world.operate()
    found = conditions(world)
    assert found["Stalled"].reason == "ClaimMismatch"
    assert "ReadWriteOncePod" in found["Stalled"].message
    assert world.get("PersistentVolumeClaim", "qwen-journal") == before


def test_a_deleted_claim_is_announced_while_the_worker_still_runs() -> None:
    world = ready_world()
    world.person_deletes(("PersistentVolumeClaim", "qwen-journal"))
    found = conditions(world)
    assert (found["Ready"].status, found["Degraded"].status) == ("True", "True")
    assert found["Degraded"].reason == "ClaimTerminating"


def degradation(world: World) -> tuple[str, str]:
    degraded = conditions(world)["Degraded"]
    return degraded.status, degraded.reason


def test_a_full_volume_of_a_ready_worker_is_reported_until_space_is_free() -> None:
    world = ready_world()
    world.worker_reports(volume_full=True)
    assert conditions(world)["Ready"].status == "True"
    assert degradation(world) == ("True", "VolumeFull")
    assert "Raise spec.storage.size" in conditions(world)["Degraded"].message.replace("raise", "Raise")
    world.worker_reports()
    assert degradation(world) == ("False", "AsExpected")


def test_a_volume_was_full_until_its_worker_says_otherwise() -> None:
    """A new leader of the operators, and a pod that has only just begun, have not heard of it yet."""
    world = ready_world()
    world.worker_reports(volume_full=True)
    world.operate()
    world.report = None
    assert degradation(world) == ("True", "VolumeFull")


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        (("StatefulSet", "qwen"), "OverridesRefused"),
        (("PersistentVolumeClaim", "qwen-journal"), "ClaimRefused"),
        (("NetworkPolicy", "qwen"), "ObjectRefused"),
        (("Secret", "qwen-tls"), "ObjectRefused"),
    ],
    ids=str,
)
def test_a_refusal_of_the_api_server_is_quoted(place: tuple[str, str], reason: str) -> None:
    world = ready_world()
    del world.objects[place], world.objects[POD]
    found = conditions(world, refusals={place[0]: 'spec.template: Invalid value: "!": a label must consist of …'})
    assert (found["Stalled"].status, found["Stalled"].reason) == ("True", reason)
    assert "a label must consist of" in found["Stalled"].message


def test_a_worker_that_runs_on_under_a_refused_change_is_ready_and_stalled() -> None:
    world = ready_world()
    world.user_sets(pod={"nodeSelector": {"zone": "!"}})
    found = conditions(world, refusals={"StatefulSet": "Invalid value"})
    assert (found["Ready"].status, found["Stalled"].status) == ("True", "True")


def test_a_reverted_change_that_was_refused_is_forgotten() -> None:
    """No further request is made, so no success reports the recovery."""
    found = conditions(ready_world(), refusals={"StatefulSet": "Invalid value"})
    assert (found["Ready"].status, found["Stalled"].status) == ("True", "False")


@pytest.mark.parametrize("place", [("Service", "qwen"), ("NetworkPolicy", "qwen"), ("Secret", "qwen-tls")])
def test_a_ready_worker_behind_a_foreign_object_is_not_ready(place: tuple[str, str]) -> None:
    world = ready_world()
    foreign_owner = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "name": "theirs",
        "uid": "theirs",
        "controller": True,
    }
    world.objects[place]["metadata"]["ownerReferences"] = [foreign_owner]
    ready = conditions(world)["Ready"]
    assert (ready.status, ready.reason) == ("False", "NameConflict")
    assert " ".join(place) in ready.message


def mark_node_lost(world: World) -> None:
    """Mark the node as the node controller does."""
    for condition in world.objects[POD]["status"]["conditions"]:
        if condition["type"] == "Ready":
            condition["status"] = "False"


def delete_and_wait(world: World) -> None:
    world.person_deletes(POD)
    world.time_passes(timedelta(seconds=121))


@pytest.mark.parametrize("happen", [mark_node_lost, delete_and_wait], ids=["marked", "overdue"])
def test_a_silent_node_is_named_with_the_cure(happen: Callable[[World], None]) -> None:
    world = ready_world()
    happen(world)
    found = conditions(world)
    assert found["Ready"].reason == found["Degraded"].reason == "NodeUnreachable"
    assert "node-1" in found["Degraded"].message
    assert "out-of-service" in found["Degraded"].message


@pytest.mark.parametrize(
    ("used", "status", "reason"), [(0, "True", "SlotsFree"), (8, "False", "AllSlotsUsed")], ids=["free", "full"]
)
def test_free_slots_are_a_condition_of_their_own(used: int, status: str, reason: str) -> None:
    world = ready_world()
    world.worker_reports(adapters_used=used)
    found = conditions(world)
    assert (found["SlotsAvailable"].status, found["SlotsAvailable"].reason) == (status, reason)
    assert found["Ready"].status == "True"


def test_a_report_that_says_nothing_new_writes_nothing() -> None:
    world = ready_world()
    world.worker_reports(adapters_used=1)
    world.settle()
    assert world.report is not None
    later = world.report.received_at + timedelta(seconds=10)
    again: WorkerReport = replace(world.report, received_at=later, last_snapshot_time=later, running_seconds=2.0)
    assert decide(replace(world.observe(), report=again), world.installation, world.now).actions == ()
