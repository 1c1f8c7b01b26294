"""The times at which a controller is asked to create refused pods again."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest
from support.operator.built_sessions import NEMO_RL
from support.operator.group_world import GroupWorld
from support.operator.model_cluster import ModelCluster
from support.operator.pool_world import PoolWorld
from support.operator.resources import pool_manifest, session_manifest
from support.operator.session_world import World
from tinsmith_operator.api.names import POD_RETRY_ANNOTATION
from tinsmith_operator.common.actions import Annotate
from tinsmith_operator.common.observed import KubernetesWarning

STEP = timedelta(seconds=20)
REFUSED = 'pods "x" is forbidden: exceeded quota: few, requested: pods=1, used: pods=0, limited: pods=0'
Steps = dict[str, Callable[[], ModelCluster]]


def refused_session(world: World | None = None, reason: str = "FailedCreate") -> World:
    world = world or World(session_manifest())
    for _ in range(6):
        world.operate()
        world.binder_works()
        world.conversion_works()
    uid = world.objects[world.workload_kind, world.name]["metadata"]["uid"]
    world.warnings.append(KubernetesWarning(world.workload_kind, uid, reason, REFUSED, world.now + timedelta(days=9)))
    world.operate()
    return world


def refused_group() -> World:
    spec = {**NEMO_RL, "parallelism": {"nodes": 3}, "modelCache": {"claimName": "models"}}
    return refused_session(GroupWorld(session_manifest(**spec)), "FailedToCreateWorkerPod")


def refused_pool() -> PoolWorld:
    world = PoolWorld(pool_manifest(replicas=2))
    world.quota = 1
    world.settle()
    return world


REFUSALS: Steps = {"session": refused_session, "group": refused_group, "pool": refused_pool}


def new_annotations(world: ModelCluster, duration: timedelta) -> list[Annotate]:
    """Return the annotations written while this time passes and nothing else happens."""
    found: list[Annotate] = []
    for _ in range(duration // STEP):
        world.time_passes(STEP)
        found += [action for action in world.operate() if isinstance(action, Annotate)]
    return found


@pytest.mark.parametrize("refusal", REFUSALS.values(), ids=REFUSALS)
def test_a_refused_pod_is_asked_for_again_after_a_minute_and_later_every_five(
    refusal: Callable[[], ModelCluster],
) -> None:
    world = refusal()
    assert len(new_annotations(world, timedelta(seconds=40))) == 0
    assert len(new_annotations(world, timedelta(seconds=40))) == 1
    new_annotations(world, timedelta(hours=1))
    assert len(new_annotations(world, timedelta(hours=1))) == 12


@pytest.mark.parametrize("value", ["never", "9999-01-01T00:00:00Z", "2026-01-01"])
def test_an_invalid_time_in_the_annotation_delays_no_pod(value: str) -> None:
    world = refused_session()
    world.objects["StatefulSet", world.name]["metadata"]["annotations"][POD_RETRY_ANNOTATION] = value
    assert len(new_annotations(world, timedelta(minutes=1))) == 1


def test_asking_again_restarts_nothing_and_says_nothing_new() -> None:
    world = refused_session()
    before = world.objects["StatefulSet", world.name]["spec"]
    [request] = new_annotations(world, timedelta(minutes=1))
    assert world.objects["StatefulSet", world.name]["spec"] == before
    assert request.annotations.keys() == {POD_RETRY_ANNOTATION}
    assert world.operate() == ()
