"""A forbidden name or mount leaves a session or pool without pods, and without a trace of the name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.operator.pool_world import PoolWorld
from support.operator.resources import pool_manifest, session_manifest
from support.operator.session_world import World
from tinsmith_operator.api.base import Manifest
from tinsmith_operator.policy import Reserved

CA = {"env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "blue-ca", "key": "tls.key"}}}]}
RESERVED = Reserved(secrets=frozenset({"blue-ca"}))
WORKLOADS = {"StatefulSet", "RayCluster", "Job", "Deployment", "Pod"}


def a_session(**spec: Any) -> World:
    world = World(session_manifest(**spec))
    world.change_installation(reserved=RESERVED)
    return world


def a_pool(**spec: Any) -> PoolWorld:
    world = PoolWorld(pool_manifest(**spec))
    world.change_installation(reserved=RESERVED)
    return world


def ready(world: World | PoolWorld) -> Manifest:
    assert world.owner is not None
    said: Manifest = world.owner["status"]["conditions"][0]
    return said


def test_a_session_that_names_an_object_of_the_installation_has_no_objects() -> None:
    world = a_session(pod=CA)
    world.settle()
    assert world.objects == {}
    assert (ready(world)["status"], ready(world)["reason"]) == ("False", "NameReserved")
    assert "Secret blue-ca (variable A of spec.pod.env)" in ready(world)["message"]


@pytest.mark.parametrize("make", [a_session, a_pool])
def test_a_running_session_that_names_a_reserved_secret_stops_until_the_name_is_removed(make: Any) -> None:
    world = make()
    world.settle()
    assert ready(world)["status"] == "True"
    world.user_sets(pod=CA)
    world.settle()
    assert [place for place in world.objects if place[0] == "Pod"] == []
    assert "blue-ca" not in json.dumps(list(world.objects.values()))
    assert ready(world)["reason"] == "NameReserved"
    world.user_sets(pod={})
    world.settle()
    assert ready(world)["status"] == "True"


def test_a_session_that_stops_for_it_keeps_its_volume() -> None:
    world = a_session()
    world.settle()
    claim = world.get("PersistentVolumeClaim", "qwen-journal")
    world.user_sets(pod=CA)
    world.settle()
    assert {kind for kind, _ in world.objects} & WORKLOADS == set()
    assert world.get("PersistentVolumeClaim", "qwen-journal") == claim


def test_a_session_that_has_no_worker_for_it_loses_no_adapters_when_it_is_deleted() -> None:
    """No worker can save them to the checkpoint root, so their volume stays."""
    world = a_session(storage={"retentionPolicy": {"whenDeleted": "Delete"}})
    world.settle()
    world.worker_reports(adapters_used=3)
    world.user_sets(pod=CA)
    world.settle()
    world.user_deletes_owner()
    world.settle()
    assert world.session is None
    assert "deletionTimestamp" not in world.objects["PersistentVolumeClaim", "qwen-journal"]["metadata"]


def test_an_image_that_a_volume_is_pinned_to_must_be_allowed_too() -> None:
    world = a_session(pod={"image": "registry.test/trainer:dev"})
    world.settle()
    world.change_installation(allowed_images=())
    world.settle()
    assert ready(world)["reason"] == "ImageNotAllowed"
    world.user_sets(pod={})
    world.settle()
    assert ready(world)["reason"] == "WorkerReady"


def test_a_refusal_of_the_volume_brings_no_image_that_is_not_allowed() -> None:
    """Every image in the pod writes the volume, so the image of the journal is checked as well."""
    world = a_session()
    world.settle()
    world.change_installation(allowed_images=())
    record = {"reason": "ImageChanged", "message": "replay first", "image": "evil.io/x:1"}
    world.container_ends(exit_code=3, message=json.dumps(record))
    world.operate()
    world.operate()
    assert "evil.io" not in json.dumps([live for place, live in world.objects.items() if place[0] != "Pod"])


@pytest.mark.parametrize("make", [a_session, a_pool])
def test_no_pod_is_made_that_would_mount_the_certificate_of_another(make: Any) -> None:
    """Session `qwen-sampler` and pool `qwen` would have it under one name."""
    world = make()
    name = "qwen-tls" if make is a_session else "qwen-sampler-tls"
    labels = {"app.kubernetes.io/managed-by": "tinsmith-operator"}
    world.add({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name, "labels": labels}, "data": {}})
    for _ in range(4):
        world.operate()
        world.cluster_works()
    assert {kind for kind, _ in world.objects} & WORKLOADS == set()
    assert ready(world)["reason"] == "NameConflict"
