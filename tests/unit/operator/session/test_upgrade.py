"""Another image gets the volume only after the old one has stopped with a snapshot."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.operator.resources import IMAGE, session_manifest
from support.operator.session_world import World
from tinsmith_operator.api.base import Manifest
from tinsmith_operator.api.names import (
    IMAGE_ANNOTATION,
    IMAGE_DIGEST_ANNOTATION,
    PREVIOUS_IMAGE_ANNOTATION,
)
from tinsmith_operator.common.ownership import owned_objects
from tinsmith_operator.policy import Policy, repository_of
from tinsmith_operator.session.upgrade import has_stopped

NEW = "tinsmith.local/tinsmith/trainer:0.2.0"


def settled_world() -> World:
    world = World(session_manifest())
    world.settle()
    return world


def pins(world: World) -> dict[str, str]:
    annotations: dict[str, str] = world.objects["PersistentVolumeClaim", "qwen-journal"]["metadata"]["annotations"]
    return annotations


def ready_reason(world: World) -> str:
    assert world.session is not None
    return str(world.session["status"]["conditions"][0]["reason"])


def stalled(world: World) -> tuple[str, str]:
    assert world.session is not None
    (condition,) = [each for each in world.session["status"]["conditions"] if each["type"] == "Stalled"]
    return condition["status"], condition["reason"]


def pod_image(world: World) -> str:
    return str(world.objects["Pod", "qwen-0"]["spec"]["containers"][0]["image"])


def test_the_digest_of_the_first_run_is_pinned_without_a_restart() -> None:
    world = settled_world()
    assert pins(world)[IMAGE_ANNOTATION] == IMAGE
    assert pins(world)[IMAGE_DIGEST_ANNOTATION].startswith("tinsmith.local/tinsmith/trainer@sha256:")
    assert world.deleted == []


OTHERS_DIGEST = "tinsmith.local/tinsmith/trainer@sha256:" + "cd" * 32


def world_beside_a_ready_worker(**spec: Any) -> World:
    world = World(session_manifest(**spec))
    world.default_image_digest = OTHERS_DIGEST
    world.settle()
    return world


def test_a_new_session_runs_the_digest_that_ready_workers_of_its_namespace_run() -> None:
    world = world_beside_a_ready_worker()
    assert pins(world)[IMAGE_ANNOTATION] == IMAGE
    assert pins(world)[IMAGE_DIGEST_ANNOTATION] == pod_image(world) == OTHERS_DIGEST
    assert world.deleted == []


@pytest.mark.parametrize("pod", [{"image": IMAGE}, {"imagePullPolicy": "Always"}], ids=["named", "pulled each time"])
def test_a_named_image_and_one_that_each_start_pulls_follow_their_tag(pod: Manifest) -> None:
    assert pod_image(world_beside_a_ready_worker(pod=pod)) == IMAGE


def test_an_image_that_is_named_by_its_digest_needs_no_pin() -> None:
    world = world_beside_a_ready_worker(pod={"image": OTHERS_DIGEST.replace("cd", "ef")})
    assert pod_image(world) == pins(world)[IMAGE_ANNOTATION] == OTHERS_DIGEST.replace("cd", "ef")
    assert IMAGE_DIGEST_ANNOTATION not in pins(world)


@pytest.mark.parametrize("image_id", ["sha256:" + "ab" * 32, "docker.io/library/import-2026@sha256:" + "ab" * 32])
def test_an_image_that_came_from_no_registry_is_run_by_its_tag(image_id: str) -> None:
    world = settled_world()
    del pins(world)[IMAGE_DIGEST_ANNOTATION]
    world.objects["Pod", "qwen-0"]["status"]["containerStatuses"][0]["imageID"] = image_id
    world.settle()
    assert IMAGE_DIGEST_ANNOTATION not in pins(world)
    assert world.session is not None
    assert world.session["status"]["imageDigest"] == image_id


def test_the_new_image_waits_until_the_old_pod_is_gone() -> None:
    world = settled_world()
    world.user_sets(pod={"image": NEW})
    world.operate()
    world.image_pull_works()
    world.operate()
    world.controller_works()
    world.operate()
    assert pins(world)[IMAGE_ANNOTATION] == IMAGE
    assert ready_reason(world) == "Upgrading"
    world.kubelet_stops()
    world.settle()
    assert (pins(world)[IMAGE_ANNOTATION], pod_image(world)) == (NEW, NEW)


def statefulset(*, replicas: int, generation: int = 2, observed: int = 2, there: int = 0) -> Manifest:
    return {
        "kind": "StatefulSet",
        "metadata": {"generation": generation},
        "spec": {"replicas": replicas},
        "status": {"observedGeneration": observed, "replicas": there},
    }


def ray_cluster(*, suspend: bool, suspended_status: str | None) -> Manifest:
    conditions = [{"type": "RayClusterSuspended", "status": suspended_status}] if suspended_status is not None else []
    status = {"state": "suspended", "conditions": conditions}
    return {"kind": "RayCluster", "metadata": {"generation": 2}, "spec": {"suspend": suspend}, "status": status}


@pytest.mark.parametrize(
    ("workload", "pod", "stopped"),
    [
        (ray_cluster(suspend=True, suspended_status="True"), None, True),
        (ray_cluster(suspend=True, suspended_status="True"), {"metadata": {}}, False),
        (ray_cluster(suspend=True, suspended_status="False"), None, False),
        (ray_cluster(suspend=True, suspended_status=None), None, False),
        (ray_cluster(suspend=False, suspended_status="True"), None, False),
        (statefulset(replicas=0), None, True),
        (None, None, True),
        (statefulset(replicas=0), {"metadata": {}}, False),
        (statefulset(replicas=1), None, False),
        (statefulset(replicas=0, observed=1), None, False),
        (statefulset(replicas=0, there=1), None, False),
    ],
    ids=[
        "KubeRay has stopped it",
        "its head is there",
        "KubeRay stops it",
        "KubeRay has not heard of it",
        "KubeRay is about to begin",
        "stopped",
        "never started",
        "its pod is there",
        "shall run",
        "has not heard of it",
        "knows of a pod",
    ],
)
def test_a_worker_has_stopped_when_no_workload_can_start_it(
    workload: Manifest | None, pod: Manifest | None, stopped: bool
) -> None:
    observed = settled_world().observe()
    if workload is not None:
        owner = {"uid": observed.session.uid, "controller": True}
        workload = {**workload, "metadata": {**workload["metadata"], "ownerReferences": [owner]}}
    observed = replace(observed, workload=workload, pod=pod)
    assert has_stopped(observed, owned_objects(observed, Policy("registry.test/trainer:1"))) is stopped


def test_a_foreign_statefulset_of_the_sessions_name_starts_no_worker_of_the_session() -> None:
    foreign_statefulset = {"kind": "StatefulSet", "metadata": {"name": "qwen", "generation": 2}}
    observed = replace(settled_world().observe(), workload=foreign_statefulset, pod=None)
    assert has_stopped(observed, owned_objects(observed, Policy("registry.test/trainer:1")))


def test_after_a_refusal_the_old_image_replays_and_the_upgrade_is_tried_again() -> None:
    world = settled_world()
    world.refused_images = {NEW: IMAGE}
    world.user_sets(pod={"image": NEW})
    world.settle()
    told = [event.reason for event in world.events]
    assert pod_image(world) == NEW
    assert told.count("Upgrading") == 2
    assert stalled(world) == ("False", "AsWanted")


def test_the_old_digest_comes_back_with_the_old_image() -> None:
    world = settled_world()
    digest = pins(world)[IMAGE_DIGEST_ANNOTATION]
    world.refused_images = {NEW: IMAGE}
    world.user_sets(pod={"image": NEW})
    seen = set()
    for _ in range(12):
        world.operate()
        world.cluster_works()
        seen |= {pod_image(world)} if ("Pod", "qwen-0") in world.objects else set()
    assert digest in seen


def test_an_image_that_refuses_twice_is_given_up_with_a_sentence() -> None:
    world = settled_world()
    world.user_sets(pod={"image": NEW})
    for _ in range(40):
        world.refused_images = {NEW: IMAGE}
        world.operate()
        world.cluster_works()
    world.settle()
    assert pins(world)[IMAGE_ANNOTATION] == IMAGE
    assert ready_reason(world) == "WorkerReady"
    assert stalled(world) == ("True", "ImageRefused")


def test_after_giving_up_another_image_is_tried() -> None:
    world = settled_world()
    world.user_sets(pod={"image": NEW})
    for _ in range(40):
        world.refused_images = {NEW: IMAGE}
        world.operate()
        world.cluster_works()
    world.refused_images = {}
    world.user_sets(pod={"image": "tinsmith.local/tinsmith/trainer:0.3.0"})
    world.settle()
    assert pod_image(world) == "tinsmith.local/tinsmith/trainer:0.3.0"
    assert stalled(world) == ("False", "AsWanted")


@pytest.mark.parametrize(
    ("reference", "repository"),
    [
        ("debian", "docker.io/library/debian"),
        ("team/trainer:1", "docker.io/team/trainer"),
        ("localhost/trainer", "localhost/trainer"),
        ("registry.test:5000/a/b:1", "registry.test:5000/a/b"),
        ("registry.test/a@sha256:ab", "registry.test/a"),
        ("docker.io/debian:trixie", "docker.io/library/debian"),
    ],
)
def test_a_repository_is_known_by_its_full_name(reference: str, repository: str) -> None:
    assert repository_of(reference) == repository


def test_an_annotation_that_says_nothing_any_more_is_taken_away_by_itself() -> None:
    world = settled_world()
    pins(world)[PREVIOUS_IMAGE_ANNOTATION] = "tinsmith.local/tinsmith/trainer:0.0.9"
    world.settle()
    assert PREVIOUS_IMAGE_ANNOTATION not in pins(world)


def test_a_webhook_that_puts_a_mirror_in_place_of_the_image_does_not_hide_which_one_runs() -> None:
    world = settled_world()
    pins(world)[PREVIOUS_IMAGE_ANNOTATION] = "tinsmith.local/tinsmith/trainer:0.0.9"
    world.objects["Pod", "qwen-0"]["spec"]["containers"][0]["image"] = "mirror.example.com/tinsmith/trainer:0.1.0"
    world.settle()
    assert PREVIOUS_IMAGE_ANNOTATION not in pins(world), "the image has arrived"
    assert world.deleted == []
