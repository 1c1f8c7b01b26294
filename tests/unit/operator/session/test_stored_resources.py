"""Sessions as earlier revisions stored them, with what their operators made of them: today's operator lets them run."""

from __future__ import annotations

from typing import Any

import pytest
from support.operator.session_world import World
from support.operator.stored_objects import STORED_IMAGE, Stored, stored
from tinsmith_operator.api.names import INPUTS_ANNOTATION, RESTART_REQUEST_ANNOTATION
from tinsmith_operator.api.training_session import parse_session
from tinsmith_operator.common.drift import holds

REVISION_1 = stored(1)
RUNNING = {name: found for name, found in REVISION_1.items() if found.child("Pod") is not None}

# As the operator was installed that wrote them.
FIRST_INSTALLATION: dict[str, Any] = {
    "namespace": "research",
    "trainer_image": STORED_IMAGE,
    "checkpoint_root": "s3://bucket/checkpoints",
    "checkpoint_claim": None,
}

UPGRADES: dict[str, dict[str, Any]] = {
    "of the operator alone": {},
    "with a new default image": {"trainer_image": STORED_IMAGE.replace(":0.1.0", ":0.2.0")},
}


def world_of(found: Stored, **installation: Any) -> World:
    world = found.world()
    world.change_installation(**{**FIRST_INSTALLATION, **installation})
    return world


def inputs_of(pod_or_template: dict[str, Any]) -> str:
    return str(pod_or_template["metadata"]["annotations"][INPUTS_ANNOTATION])


def test_every_shape_exists() -> None:
    assert set(REVISION_1) == {
        "deleted-with-its-volume",
        "everything",
        "gpu",
        "hub",
        "least",
        "own-image",
        "stuck",
        "suspended",
    }
    assert set(REVISION_1) - set(RUNNING) == {"stuck", "suspended"}


@pytest.mark.parametrize("found", REVISION_1.values(), ids=REVISION_1)
def test_a_stored_session_is_read_with_all_of_its_fields(found: Stored) -> None:
    session = parse_session(found.session)
    assert session.status.to_manifest() == found.session["status"]
    assert holds(session.spec.to_manifest(), found.session["spec"])


@pytest.mark.parametrize("upgrade", UPGRADES.values(), ids=UPGRADES)
@pytest.mark.parametrize("found", REVISION_1.values(), ids=REVISION_1)
def test_an_upgrade_restarts_nothing(found: Stored, upgrade: dict[str, Any]) -> None:
    world = world_of(found, **upgrade)
    world.settle()
    assert world.deleted == []
    pod, before = world.get("Pod", f"{found.name}-0"), found.child("Pod")
    assert (pod or {}).get("metadata", {}).get("uid") == (before or {}).get("metadata", {}).get("uid")


@pytest.mark.parametrize("found", RUNNING.values(), ids=RUNNING)
def test_todays_hash_of_what_its_user_said_is_the_one_on_its_pod(found: Stored) -> None:
    world = world_of(found)
    world.settle()
    workload, pod = world.get("StatefulSet", found.name), found.child("Pod")
    assert workload is not None
    assert pod is not None
    assert inputs_of(workload["spec"]["template"]) == inputs_of(pod)


@pytest.mark.parametrize("found", RUNNING.values(), ids=RUNNING)
def test_these_tests_would_notice_a_restart(found: Stored) -> None:
    world = world_of(found)
    world.user_annotates(RESTART_REQUEST_ANNOTATION, "2026-12-01T00:00:00Z")
    world.settle()
    assert [deleted["kind"] for deleted in world.deleted] == ["Pod"]


@pytest.mark.parametrize("found", RUNNING.values(), ids=RUNNING)
def test_it_stays_ready_throughout(found: Stored) -> None:
    world = world_of(found)
    world.settle()
    assert world.session is not None
    status = {condition["type"]: condition["status"] for condition in world.session["status"]["conditions"]}
    assert (status["Ready"], status["Stalled"], status["Degraded"]) == ("True", "False", "False")
