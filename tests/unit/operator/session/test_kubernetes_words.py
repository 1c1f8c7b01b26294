"""Kubernetes' own words about a pod or another object, and the session's words for them."""

from __future__ import annotations

from datetime import timedelta

import pytest
from support.operator.pod_states import (
    NO_GPU,
    POD,
    conditions,
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

NOT_ADMITTED = {
    "quota": ("exceeded quota: small, requested: memory=4Gi, used: memory=0, limited: memory=1Gi", "QuotaExceeded"),
    "quota without room": ("insufficient quota to consume: nvidia.com/gpu", "QuotaExceeded"),
    "quota on what is not named": ("failed quota: all: must specify limits.cpu for: worker", "ResourcesRefused"),
    "largest": ("maximum cpu usage per Container is 2, but limit is 4", "ResourcesRefused"),
    "smallest": ("minimum memory usage per Pod is 1Gi. No request is specified", "ResourcesRefused"),
    "ratio": ("cpu max limit to request ratio per Container is 2, but provided ratio is 4", "ResourcesRefused"),
    "webhook": ('admission webhook "a.example" denied the request: exceeded quota: of licences', "AdmissionDenied"),
    "policy": ("ValidatingAdmissionPolicy 'a' with binding 'b' denied request: no", "AdmissionDenied"),
    "pod security": ('violates PodSecurity "restricted:latest": hostPath volumes', "AdmissionDenied"),
    "webhook that is down": (
        'Internal error occurred: failed calling webhook "a.example": failed to call webhook: Post "https://a.b.svc": '
        "dial tcp 10.0.0.1:443: connect: connection refused",
        "WebhookUnreachable",
    ),
    "namespace": ("unable to create new content in namespace x because it is being terminated", "NamespaceTerminating"),
}
"""The words are those of Kubernetes' sources."""


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        *NOT_ADMITTED.values(),
        ('pods "qwen-0" is forbidden: error looking up service account research/x', "PodRefused"),
        ("no PriorityClass with name urgent was found", "PodRefused"),
        ('pod rejected: RuntimeClass "nvidia" not found', "PodRefused"),
    ],
)
def test_a_pod_that_may_not_be_created_is_explained_by_the_statefulsets_warning(message: str, reason: str) -> None:
    world = starting_world()
    del world.objects[POD]
    warn(world, ("StatefulSet", "qwen"), "FailedCreate", message)
    ready = conditions(world)["Ready"]
    assert ready.reason == reason
    assert message in ready.message


@pytest.mark.parametrize("kind", ["StatefulSet", "Secret"])
@pytest.mark.parametrize(("message", "reason"), NOT_ADMITTED.values(), ids=NOT_ADMITTED)
def test_an_object_that_is_not_admitted_has_the_cure_of_the_cause(kind: str, message: str, reason: str) -> None:
    world = World(session_manifest())
    world.operate()
    ready = conditions(world, refusals={kind: message})["Ready"]
    assert ready.reason == reason
    assert message in ready.message


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ("exceeded quota: disks, requested: requests.storage=10Gi", "ClaimRefused"),
        ("maximum storage usage per PersistentVolumeClaim is 1Gi, but request is 10Gi", "ClaimRefused"),
        ('failed calling webhook "a.example": no endpoints', "WebhookUnreachable"),
    ],
)
def test_a_claim_that_is_not_admitted_has_a_cure_that_concerns_claims(message: str, reason: str) -> None:
    world = World(session_manifest())
    world.operate()
    assert conditions(world, refusals={"PersistentVolumeClaim": message})["Ready"].reason in (reason, "CreatingObjects")
    del world.objects["PersistentVolumeClaim", "qwen-journal"]
    assert conditions(world, refusals={"PersistentVolumeClaim": message})["Ready"].reason == reason


@pytest.mark.parametrize(
    ("gates", "reason"),
    [
        (["kueue.x-k8s.io/admission"], "Queued"),
        (["kueue.x-k8s.io/topology", "example.com/licence"], "Queued"),
        (["example.com/licence"], "SchedulingGated"),
    ],
    ids=str,
)
def test_a_pod_that_gates_keep_from_the_scheduler_names_them(gates: list[str], reason: str) -> None:
    message = "Scheduling is blocked due to non-empty scheduling gates"
    gated = {"type": "PodScheduled", "status": "False", "reason": "SchedulingGated", "message": message}
    world = starting_world({"conditions": [gated]})
    world.objects[POD]["spec"]["schedulingGates"] = [{"name": gate} for gate in gates]
    ready = conditions(world)["Ready"]
    assert ready.reason == reason
    assert all(gate in ready.message for gate in gates)


@pytest.mark.parametrize(
    ("status_reason", "reason"),
    [
        ("Evicted", "Evicted"),
        ("Terminated", "Evicted"),
        ("NodeShutdown", "Evicted"),
        ("Preempting", "Preempted"),
        ("UnexpectedAdmissionError", "NodeRefusesPod"),
        ("OutOfnvidia.com/gpu", "NodeRefusesPod"),
        ("OutOfcpu", "NodeRefusesPod"),
        ("TopologyAffinityError", "NodeRefusesPod"),
        ("VolumeAttachmentLimitExceeded", "NodeRefusesPod"),
        ("SomethingNew", "NodeRefusesPod"),
    ],
)
def test_a_pod_that_its_node_ended_or_never_admitted_is_quoted(status_reason: str, reason: str) -> None:
    message = "Allocate failed due to no healthy devices present; cannot allocate unhealthy devices nvidia.com/gpu"
    world = starting_world({"phase": "Failed", "reason": status_reason, "message": message}, "node-1")
    ready = conditions(world)["Ready"]
    assert ready.reason == reason
    assert f"on node node-1 failed: {status_reason}: {message}" in ready.message


def disrupted(reason: str) -> Manifest:
    return {"conditions": [{"type": "DisruptionTarget", "status": "True", "reason": reason}]}


def test_a_pod_that_made_room_for_another_is_preempted_until_its_successor_has_a_node() -> None:
    world = ready_world()
    world.objects[POD]["metadata"]["deletionTimestamp"] = format_time(world.now + timedelta(seconds=60))
    world.objects[POD]["status"] = disrupted("PreemptionByScheduler")
    world.operate()
    assert conditions(world)["Ready"].reason == "Preempted"
    del world.objects[POD]
    for seen in ("no pod", "a pod that the scheduler has not looked at"):
        world.operate()
        assert conditions(world)["Ready"].reason == "Preempted", seen
        world.controller_works()
    world.objects[POD]["status"] = unscheduled(NO_GPU)
    world.operate()
    ready = conditions(world)["Ready"]
    assert ready.reason == "Preempted"
    assert "3 Insufficient nvidia.com/gpu" in ready.message
    world.settle()
    world.objects[POD]["status"] = unscheduled(NO_GPU)
    del world.objects[POD]["spec"]["nodeName"]
    assert conditions(world)["Ready"].reason == "Unschedulable"


@pytest.mark.parametrize(
    ("why", "reason", "says"),
    [
        ("TerminationByKubelet", "Evicted", "was terminated by its node"),
        ("EvictionByEvictionAPI", "Restarting", "its node is being drained"),
        ("DeletionByTaintManager", "Restarting", "does not tolerate a new taint"),
        ("DeletionByPodGC", "Restarting", "was on a node that is gone"),
    ],
)
def test_the_message_names_the_cause_of_a_pods_eviction(why: str, reason: str, says: str) -> None:
    world = ready_world()
    world.objects[POD]["metadata"]["deletionTimestamp"] = format_time(world.now + timedelta(seconds=60))
    world.objects[POD]["status"] = disrupted(why)
    ready = conditions(world)["Ready"]
    assert (ready.reason, says in ready.message) == (reason, True)


@pytest.mark.parametrize("warning", ["FailedCreatePodSandBox", "NetworkNotReady", "FailedPrepareDynamicResources"])
def test_a_pod_that_its_node_cannot_set_up_is_explained_by_the_pods_warning(warning: str) -> None:
    world = starting_world(waiting("ContainerCreating"), "node-1")
    warn(world, POD, warning, 'no runtime for "nvidia" is configured')
    ready = conditions(world)["Ready"]
    assert (ready.reason, "no runtime for" in ready.message) == ("CannotStart", True)


@pytest.mark.parametrize(
    "status",
    [unscheduled(NO_GPU), waiting("ErrImagePull", "denied"), waiting("ContainerCreating"), {}],
    ids=["moving", "stuck", "under way", "new"],
)
def test_one_condition_next_to_ready_has_the_progress_of_a_session(status: Manifest) -> None:
    found = conditions(starting_world(status, "node-1" if "containerStatuses" in status else None))
    told = {type_ for type_ in ("Reconciling", "Stalled") if found[type_].message == found["Ready"].message}
    assert told == {type_ for type_ in ("Reconciling", "Stalled") if found[type_].status == "True"}
    assert len(told) == 1


WORKERS_WORDS = {
    "ModelNotFound": "The model directory /models/qwen does not exist. Put the model's files there.",
    "ModelChanged": "The files of /models/qwen changed. Put the old files back, or serve the new ones elsewhere.",
    "VolumeUnsuitable": "The volume is on NFS. Put it on block storage with a file system of its own.",
    "ModelCannotLoad": "The engine peft cannot load it: oops. Serve a model that it can run.",
    "SomethingElse": "It is Friday. Come back on Monday.",
}


@pytest.mark.parametrize(("reason", "words"), WORKERS_WORDS.items(), ids=WORKERS_WORDS)
def test_the_advice_of_a_worker_is_not_repeated(reason: str, words: str) -> None:
    ready = conditions(starting_world(refused(reason, words), "node-1"))["Ready"]
    assert ready.message == f"The worker refuses to start: {words}"


def test_facts_of_the_cluster_are_added_to_the_message_of_a_worker() -> None:
    words = "There is no memory for qwen: 80 GiB. Give the worker more."
    ready = conditions(starting_world(refused("OutOfMemory", words), "node-1"))["Ready"]
    assert "spec.resources.limits.memory" in ready.message
