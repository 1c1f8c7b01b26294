"""Another image is pulled onto the worker's node before the worker stops for it."""

from __future__ import annotations

from typing import Any

import pytest
from support.operator.resources import IMAGE, session_manifest
from support.operator.session_world import World
from tinsmith_operator.api.base import Manifest
from tinsmith_operator.api.names import QUEUE_LABEL, RESTART_REQUEST_ANNOTATION
from tinsmith_operator.common.observed import KubernetesWarning

NEW = "tinsmith.local/tinsmith/trainer:0.2.0"
BAD = "tinsmith.local/tinsmith/trainer:0.2.0-typo"
JOB = ("Job", "qwen-image-pull")
POD = ("Pod", "qwen-0")


def settled(**spec: Any) -> World:
    world = World(session_manifest(**spec))
    world.settle()
    return world


def condition(world: World, type_: str) -> Manifest:
    assert world.session is not None
    found: Manifest = next(each for each in world.session["status"]["conditions"] if each["type"] == type_)
    return found


def image_of(world: World) -> str:
    arguments = world.objects[POD]["spec"]["containers"][0]["args"]
    return next(each.removeprefix("--image=") for each in arguments if each.startswith("--image="))


def node_terms(job: Manifest) -> list[Manifest]:
    affinity = job["spec"]["template"]["spec"]["affinity"]["nodeAffinity"]
    terms: list[Manifest] = affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    return terms


def name_in_the_spec(world: World, image: str) -> None:
    world.user_sets(pod={"image": image})


def restart_on_a_new_default(world: World, image: str) -> None:
    world.change_installation(trainer_image=image)
    world.user_annotates(RESTART_REQUEST_ANNOTATION, "2026-02-01T12:00:00Z")


def take_a_turn(world: World, image: str) -> None:
    world.change_installation(trainer_image=image)
    world.has_turn = True


WAYS = pytest.mark.parametrize("ask_for", [name_in_the_spec, restart_on_a_new_default, take_a_turn])


@WAYS
def test_an_image_that_cannot_be_pulled_leaves_the_worker_running_and_says_why(ask_for: Any) -> None:
    world = settled()
    before = world.objects[POD]["metadata"]["uid"]
    world.unpullable_images = {BAD}
    ask_for(world, BAD)
    world.settle()
    assert world.objects[POD]["metadata"]["uid"] == before
    assert condition(world, "Ready")["status"] == "True"
    stalled = condition(world, "Stalled")
    assert (stalled["status"], stalled["reason"]) == ("True", "ImagePullFailed")
    assert BAD in stalled["message"]
    assert f"Meanwhile the worker runs {IMAGE}" in stalled["message"]
    assert condition(world, "UpgradeAvailable")["status"] == "True"


@WAYS
def test_an_image_that_can_be_pulled_later_is_taken_then_and_nothing_of_the_pull_is_left(ask_for: Any) -> None:
    world = settled()
    world.unpullable_images = {NEW}
    ask_for(world, NEW)
    world.settle()
    assert image_of(world) == IMAGE
    world.unpullable_images = set()
    world.settle()
    assert image_of(world) == NEW
    assert JOB not in world.objects
    assert world.pullers() == []
    assert condition(world, "Stalled")["status"] == "False"


def test_a_session_returns_to_its_state_when_a_bad_image_is_reverted() -> None:
    world = settled()
    before = world.objects[POD]["metadata"]["uid"]
    world.unpullable_images = {BAD}
    name_in_the_spec(world, BAD)
    world.settle()
    name_in_the_spec(world, IMAGE)
    world.settle()
    assert world.objects[POD]["metadata"]["uid"] == before
    assert JOB not in world.objects
    assert condition(world, "Stalled")["status"] == "False"


def test_changes_together_with_the_image_cause_one_restart() -> None:
    world = settled()
    world.user_sets(pod={"image": NEW}, resources={"requests": {"cpu": "2"}})
    world.operate()
    world.operate()
    assert "deletionTimestamp" not in world.objects[POD]["metadata"]
    world.settle()
    assert [each["kind"] for each in world.deleted].count("Pod") == 2, "the worker's, and the one that pulled"
    assert image_of(world) == NEW


def test_an_image_that_does_not_run_at_all_stops_no_worker() -> None:
    world = settled()
    name_in_the_spec(world, BAD)
    world.operate()
    world.objects[JOB]["status"] = {"conditions": [{"type": "Failed", "status": "True", "message": "too many tries"}]}
    world.settle()
    assert image_of(world) == IMAGE
    assert condition(world, "Stalled")["reason"] == "CannotStart"


def with_puller(image: str, status: Manifest, **spec: Any) -> World:
    """Return a session whose image pull has a pod with this status."""
    world = settled()
    world.user_sets(pod={"image": image, **spec})
    world.operate()
    job = world.objects[JOB]
    world.add(world._pod_of(job, job["spec"]["template"], f"{JOB[1]}-x7k2p"))["status"] = status
    return world


UNSCHEDULABLE = {
    "a node that the spec names no more": "1 node(s) didn't match Pod's node affinity/selector",
    "a node that is cordoned": "1 node(s) were unschedulable",
    "a node that is full": "1 Insufficient memory",
}


@pytest.mark.parametrize("why", UNSCHEDULABLE.values(), ids=UNSCHEDULABLE)
def test_a_worker_stops_for_its_image_without_a_pull_where_its_node_has_no_room_for_the_pod(why: str) -> None:
    unscheduled = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": why}
    world = with_puller(NEW, {"conditions": [unscheduled]}, nodeSelector={"pool": "other"})
    world.operate()
    assert world.objects["StatefulSet", "qwen"]["spec"]["replicas"] == 0
    assert JOB not in world.objects
    world.settle()
    assert image_of(world) == NEW
    assert world.pullers() == []


def test_a_pull_is_done_when_its_container_is_although_a_sidecar_keeps_its_job_from_completing() -> None:
    done = {"name": "worker", "restartCount": 0, "state": {"terminated": {"exitCode": 0, "reason": "Completed"}}}
    sidecar = {"name": "istio-proxy", "restartCount": 0, "state": {"running": {}}}
    world = with_puller(NEW, {"phase": "Running", "containerStatuses": [sidecar, done]})
    world.operate()
    assert world.objects["StatefulSet", "qwen"]["spec"]["replicas"] == 0
    assert JOB not in world.objects


REFUSED = 'pods "qwen-image-pull-x7k2p" is forbidden: '


@pytest.mark.parametrize(
    ("refused", "waits"),
    [
        ("exceeded quota: team, requested: pods=1, used: pods=4, limited: pods=4", False),
        ("minimum memory usage per Container is 128Mi, but request is 64Mi", False),
        ('violates PodSecurity "restricted:latest": seccompProfile', True),
        ('image policy webhook: admission webhook "images.example" denied the request: no signature', True),
    ],
)
def test_a_pull_beyond_the_quota_does_not_stop_the_worker_and_a_pull_that_a_policy_denies_does(
    refused: str, waits: bool
) -> None:
    world = settled()
    name_in_the_spec(world, NEW)
    world.operate()
    uid = world.objects[JOB]["metadata"]["uid"]
    world.warnings.append(KubernetesWarning("Job", uid, "FailedCreate", REFUSED + refused, world.now))
    world.operate()
    assert world.objects["StatefulSet", "qwen"]["spec"]["replicas"] == int(waits)
    assert (JOB in world.objects) is waits


def test_warnings_about_the_pull_are_looked_for_although_the_worker_is_ready() -> None:
    world = settled()
    name_in_the_spec(world, NEW)
    world.operate()
    world.operate()
    at_rest = world.decide()
    assert at_rest.actions == ()
    assert at_rest.requeue_after_seconds == 20


def test_a_worker_that_crashes_while_its_next_image_cannot_be_pulled_stays_on_the_old_one() -> None:
    world = settled()
    world.unpullable_images = {BAD}
    name_in_the_spec(world, BAD)
    world.settle()
    world.container_ends(exit_code=1)
    world.operate()
    assert world.objects["StatefulSet", "qwen"]["spec"]["replicas"] == 1
    assert condition(world, "Ready")["reason"] == "CrashLoop"
    world.settle()
    assert image_of(world) == IMAGE
    assert condition(world, "Ready")["status"] == "True"
    assert condition(world, "Stalled")["reason"] == "ImagePullFailed"


def test_a_drained_worker_comes_back_on_the_old_image_when_the_next_one_cannot_be_pulled() -> None:
    world = settled()
    world.unpullable_images = {BAD}
    name_in_the_spec(world, BAD)
    world.settle()
    world.person_deletes(POD)
    for step in (world.operate, world.kubelet_stops, world.controller_works, world.kubelet_starts):
        step()
        world.operate()
        assert world.objects["StatefulSet", "qwen"]["spec"]["replicas"] == 1, step
    assert image_of(world) == IMAGE
    world.objects[POD]["spec"]["nodeName"] = "node-2"
    world.operate()
    world.operate()
    [term] = node_terms(world.objects[JOB])
    assert term["matchFields"][0]["values"] == ["node-2"]
    world.unpullable_images = set()
    world.settle()
    assert image_of(world) == BAD


def test_deleting_a_session_ends_the_pull_before_the_worker_has_stopped() -> None:
    world = settled(storage={"retentionPolicy": {"whenDeleted": "Delete"}})
    world.unpullable_images = {BAD}
    name_in_the_spec(world, BAD)
    world.settle()
    world.user_deletes_owner()
    world.operate()
    assert world.session is not None
    assert JOB not in world.objects


def test_the_pod_that_pulls_gets_the_image_as_the_worker_would_on_its_node_under_the_restricted_standard() -> None:
    said = {
        "imagePullSecrets": [{"name": "registry"}],
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "nodeSelector": {"pool": "gpu"},
        "serviceAccountName": "trainer",
        "labels": {QUEUE_LABEL: "team", "sidecar.istio.io/inject": "false"},
    }
    world = settled(pod=said)
    world.user_sets(pod={**said, "image": NEW})
    world.operate()
    template = world.objects[JOB]["spec"]["template"]
    spec, [container] = template["spec"], template["spec"]["containers"]
    for field in ("imagePullSecrets", "tolerations", "nodeSelector", "serviceAccountName"):
        assert spec[field] == said[field]
    [term] = node_terms(world.objects[JOB])
    assert term == {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["node-1"]}]}
    assert (spec["securityContext"]["runAsNonRoot"], spec["automountServiceAccountToken"]) == (True, False)
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert (spec["volumes"], container.get("envFrom"), container.get("volumeMounts")) == ([], None, None)
    assert QUEUE_LABEL not in template["metadata"]["labels"]
    assert template["metadata"]["labels"]["sidecar.istio.io/inject"] == "false"
    assert template["metadata"]["labels"]["app.kubernetes.io/name"] == "tinsmith-image-pull"
