"""A person can stop the operator's work on one session or pool, and can end a deletion that waits for a worker."""

from __future__ import annotations

import copy
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.operator.model_cluster import ModelCluster
from support.operator.pool_world import PoolWorld
from support.operator.resources import pool_manifest, session_manifest
from support.operator.session_world import World
from tinsmith_operator.api.names import PAUSED_ANNOTATION, SKIP_FINALIZER_ANNOTATION
from tinsmith_operator.common.actions import Emit, WriteStatus

DELETES = {"retentionPolicy": {"whenDeleted": "Delete"}}
WORLDS = pytest.mark.parametrize("make", [lambda: World(session_manifest()), lambda: PoolWorld(pool_manifest())])
CHANGES: dict[str, Any] = {
    "suspend": True,
    "replicas": 0,
    "idle": {"deleteAfterSeconds": 10},
    "activeDeadlineSeconds": 1,
    "pod": {"image": "tinsmith.local/tinsmith/trainer:0.2.0"},
    "maxSequenceLength": 2048,
}


def condition(world: ModelCluster, type_: str) -> tuple[str, str]:
    assert world.owner is not None
    found = next(each for each in world.owner["status"]["conditions"] if each["type"] == type_)
    return found["status"], found["reason"]


@WORLDS
def test_a_paused_resource_is_reported_and_not_changed(make: Any) -> None:
    world = make()
    world.settle()
    world.user_annotates(PAUSED_ANNOTATION, "true")
    for place in list(world.objects):
        if place[0] in ("Service", "NetworkPolicy"):
            world.person_edits(place)
    before = copy.deepcopy(world.objects)
    world.settle()
    assert condition(world, "Stalled") == ("True", "Paused")
    assert condition(world, "Ready")[0] == "True"
    assert world.objects == before
    world.user_annotates(PAUSED_ANNOTATION, None)
    world.settle()
    assert condition(world, "Stalled")[0] == "False"


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(sorted(CHANGES)), st.booleans(), st.integers(0, 100_000))
def test_no_change_of_a_paused_session_writes_anything_but_its_status(
    field: str, is_deleted: bool, seconds: int
) -> None:
    world = World(session_manifest(storage=DELETES))
    world.settle()
    world.user_annotates(PAUSED_ANNOTATION, "true")
    world.user_sets(**{field: CHANGES[field]})
    if is_deleted:
        world.user_deletes_owner()
    world.worker_reports(running_seconds=10_000, idle_seconds=10_000)
    world.time_passes(timedelta(seconds=seconds))
    assert {type(action) for action in world.decide().actions} <= {WriteStatus, Emit}


@pytest.mark.parametrize("paused", [None, "true"])
def test_a_skipped_finalizer_ends_the_deletion_and_keeps_the_claim(paused: str | None) -> None:
    world = World(session_manifest(storage=DELETES))
    world.settle()
    world.worker_reports(adapters_used=3)
    world.user_annotates(PAUSED_ANNOTATION, paused)
    world.user_deletes_owner()
    world.operate()
    assert world.owner is not None
    world.user_annotates(SKIP_FINALIZER_ANNOTATION, "true")
    world.settle()
    assert world.owner is None
    assert world.get("PersistentVolumeClaim", "qwen-journal") is not None
    assert "FinalizerSkipped" in [event.reason for event in world.events]
