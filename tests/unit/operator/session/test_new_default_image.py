"""The installation gets another default image: no worker restarts for it, and a worker that restarts takes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.operator.resources import IMAGE, session_manifest
from support.operator.session_world import World
from tinsmith_operator.api.base import Manifest
from tinsmith_operator.api.names import (
    IMAGE_ANNOTATION,
    IMAGE_CHOICE_ANNOTATION,
    IMAGE_DIGEST_ANNOTATION,
    RESTART_REQUEST_ANNOTATION,
)

NEW = "tinsmith.local/tinsmith/trainer:0.2.0"
NEWER = "tinsmith.local/tinsmith/trainer:0.3.0"
OWN = "registry.test/trainer:dev"
POD = ("Pod", "qwen-0")
CLAIM = ("PersistentVolumeClaim", "qwen-journal")


def settled_world(**spec: Any) -> World:
    world = World(session_manifest(**spec))
    world.settle()
    return world


def with_new_default(**spec: Any) -> World:
    world = settled_world(**spec)
    world.change_installation(trainer_image=NEW)
    world.settle()
    return world


def running_image(world: World) -> str:
    """Return the image in the worker's pod."""
    arguments = world.objects[POD]["spec"]["containers"][0]["args"]
    return next(each.removeprefix("--image=") for each in arguments if each.startswith("--image="))


def available(world: World) -> Manifest:
    assert world.session is not None
    conditions = world.session["status"]["conditions"]
    [condition] = [each for each in conditions if each["type"] == "UpgradeAvailable"]
    found: Manifest = condition
    return found


def ask_for_a_restart(world: World, at: str = "2026-02-01T12:00:00Z") -> None:
    world.user_annotates(RESTART_REQUEST_ANNOTATION, at)


def test_a_running_session_keeps_its_image_and_says_that_there_is_another() -> None:
    world = with_new_default()
    assert running_image(world) == IMAGE
    assert world.deleted == []
    condition = available(world)
    assert (condition["status"], condition["reason"]) == ("True", "NewDefaultImage")
    assert NEW in condition["message"]
    assert IMAGE in condition["message"]
    assert "restart-requested-at" in condition["message"]


WAYS: dict[str, Callable[[World], Any]] = {
    "asked to restart": ask_for_a_restart,
    "another spec": lambda world: world.user_sets(adapters={"slots": 4}),
}


@pytest.mark.parametrize("restart", WAYS.values(), ids=WAYS)
def test_the_next_clean_restart_brings_it(restart: Callable[[World], Any]) -> None:
    world = with_new_default()
    restart(world)
    world.settle()
    assert running_image(world) == NEW
    assert available(world)["status"] == "False"


def test_the_new_image_waits_until_the_old_pod_has_stopped() -> None:
    world = with_new_default()
    ask_for_a_restart(world)
    world.operate()
    world.controller_works()
    world.operate()
    assert world.objects[CLAIM]["metadata"]["annotations"][IMAGE_ANNOTATION] == IMAGE
    world.settle()
    assert running_image(world) == NEW


def crash(world: World) -> None:
    world.container_ends(exit_code=1)


def hang(world: World) -> None:
    world.worker_reports(running_seconds=10_000)


def drain(world: World) -> None:
    world.person_deletes(POD)


def repair(world: World) -> None:
    world.person_deletes(("StatefulSet", "qwen"))


@pytest.mark.parametrize("end", [crash, hang, drain, repair])
def test_a_worker_that_stopped_without_a_request_comes_back_on_its_image(end: Any) -> None:
    world = with_new_default()
    end(world)
    world.settle()
    assert running_image(world) == IMAGE


def test_a_reverted_default_restarts_nothing_and_removes_the_condition() -> None:
    world = with_new_default()
    world.change_installation(trainer_image=IMAGE)
    world.settle()
    assert available(world)["status"] == "False"
    assert world.deleted == []
    assert running_image(world) == IMAGE


def test_a_session_with_the_new_image_keeps_it_when_the_default_is_reverted() -> None:
    world = with_new_default()
    ask_for_a_restart(world)
    world.settle()
    world.deleted.clear()
    world.change_installation(trainer_image=IMAGE)
    world.settle()
    assert (running_image(world), available(world)["status"], world.deleted) == (NEW, "True", [])


@pytest.mark.parametrize("image", [NEW, NEWER])
def test_an_image_in_the_spec_is_used_at_once(image: str) -> None:
    world = with_new_default()
    world.user_sets(pod={"image": image})
    world.settle()
    assert running_image(world) == image


def test_the_claim_records_who_chose_the_image_only_if_the_session_did() -> None:
    """The claims of existing sessions therefore do not change when the operator is upgraded."""
    annotations = settled_world().objects[CLAIM]["metadata"]["annotations"]
    assert IMAGE_CHOICE_ANNOTATION not in annotations
    annotations = settled_world(pod={"image": OWN}).objects[CLAIM]["metadata"]["annotations"]
    assert annotations[IMAGE_CHOICE_ANNOTATION] == "session"


def test_an_upgrade_that_the_volume_refuses_once_is_tried_again() -> None:
    world = with_new_default()
    world.refused_images = {NEW: IMAGE}
    ask_for_a_restart(world)
    world.settle()
    assert running_image(world) == NEW
    assert available(world)["status"] == "False"


def test_an_image_that_was_given_up_is_not_offered_and_the_next_default_is() -> None:
    world = with_new_default()
    ask_for_a_restart(world)
    for _ in range(40):
        world.refused_images = {NEW: IMAGE}
        world.operate()
        world.cluster_works()
    world.refused_images = {}
    assert running_image(world) == IMAGE
    assert available(world)["status"] == "False"
    world.change_installation(trainer_image=NEWER)
    world.settle()
    assert (running_image(world), available(world)["status"]) == (IMAGE, "True")
    ask_for_a_restart(world, "2026-02-02T12:00:00Z")
    world.settle()
    assert running_image(world) == NEWER


def test_removed_annotations_of_a_claim_do_not_restart_its_worker() -> None:
    world = with_new_default()
    world.objects[CLAIM]["metadata"]["annotations"] = {}
    world.settle()
    assert (running_image(world), world.deleted) == (IMAGE, [])
    assert IMAGE_DIGEST_ANNOTATION in world.objects[CLAIM]["metadata"]["annotations"]


def test_a_new_session_on_a_volume_from_before_takes_the_default_of_today() -> None:
    world = settled_world()
    world.user_deletes_owner()
    world.settle()
    again = World(session_manifest())
    again.objects[CLAIM] = world.objects[CLAIM]
    again.change_installation(trainer_image=NEW)
    again.settle()
    assert running_image(again) == NEW


# ---- whatever happens


steps = st.sampled_from(
    [
        lambda world: world.operate(),
        lambda world: world.controller_works(),
        lambda world: world.kubelet_starts(),
        lambda world: world.kubelet_stops(),
        crash,
        hang,
        drain,
        repair,
        lambda world: world.change_installation(trainer_image=IMAGE),
        lambda world: world.change_installation(trainer_image=NEW),
        lambda world: world.change_installation(trainer_image=NEWER),
    ]
)
SETTINGS = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@given(life=st.lists(steps, max_size=25))
@SETTINGS
def test_no_default_changes_a_running_worker(life: list[Callable[[World], Any]]) -> None:
    world = settled_world()
    for step in life:
        step(world)
        if POD in world.objects:
            assert running_image(world) == IMAGE
    world.settle()
    assert running_image(world) == IMAGE
    assert (available(world)["status"] == "True") == (world.installation.trainer_image != IMAGE)


@given(life=st.lists(steps, max_size=12), after=st.lists(steps, max_size=12))
@SETTINGS
def test_one_request_to_restart_ends_on_a_default_of_then_or_later(
    life: list[Callable[[World], Any]], after: list[Callable[[World], Any]]
) -> None:
    world = settled_world()
    for step in life:
        step(world)
    ask_for_a_restart(world)
    defaults = {world.installation.trainer_image}
    for step in after:
        step(world)
        defaults.add(world.installation.trainer_image)
    world.settle()
    assert running_image(world) in defaults
    assert world.objects[POD]["metadata"]["annotations"][RESTART_REQUEST_ANNOTATION] == "2026-02-01T12:00:00Z"
    world.deleted.clear()
    world.change_installation(trainer_image=OWN)
    world.settle()
    assert world.deleted == []
