"""The changes that restart a worker at once, those that wait for a slot, and those that restart nothing."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.operator.resources import IMAGE, session_manifest
from support.operator.session_world import World
from tinsmith_operator.api.base import Manifest
from tinsmith_operator.api.names import RESTART_REQUEST_ANNOTATION, SPEC_ANNOTATION

NEW = "tinsmith.local/tinsmith/trainer:0.2.0"
POD = ("Pod", "qwen-0")
WORKLOAD = ("StatefulSet", "qwen")
ROOT = {"checkpoint_root": "s3://elsewhere", "checkpoint_claim": None}
SECRETS = {"imagePullSecrets": [{"name": "registry"}]}


def settled(**spec: Any) -> World:
    world = World(session_manifest(**spec))
    world.settle()
    return world


def upgrade(world: World) -> Manifest:
    assert world.session is not None
    found: Manifest = next(each for each in world.session["status"]["conditions"] if each["type"] == "UpgradeAvailable")
    return found


def arguments(world: World) -> list[str]:
    found: list[str] = world.objects[POD]["spec"]["containers"][0]["args"]
    return found


def template(world: World) -> Manifest:
    found: Manifest = world.objects[WORKLOAD]["spec"]["template"]
    return found


def pull_policy(world: World) -> str:
    return str(template(world)["spec"]["containers"][0]["imagePullPolicy"])


# ---- how a node gets the image


@pytest.mark.parametrize("policy", ["Always", "Never"])
def test_another_pull_policy_of_the_installation_waits_for_the_next_start(policy: str) -> None:
    world = settled()
    world.change_installation(trainer_image_pull_policy=policy)
    world.settle()
    assert world.deleted == []
    assert pull_policy(world) == policy


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, {"imagePullPolicy": "Always"}),
        ({"imagePullPolicy": "Always"}, {}),
        ({"imagePullPolicy": "Always"}, {"imagePullPolicy": "Never"}),
        ({}, SECRETS),
        (SECRETS, {}),
        (SECRETS, {"imagePullSecrets": [{"name": "other"}]}),
        ({"env": [{"name": "A", "value": "1"}], **SECRETS}, {"env": [{"name": "A", "value": "1"}]}),
        ({}, {"image": IMAGE}),
    ],
    ids=str,
)
def test_another_way_to_the_same_image_in_the_spec_restarts_no_worker(before: Manifest, after: Manifest) -> None:
    world = settled(pod=before)
    world.change_installation(trainer_image_pull_policy="Never")
    world.user_sets(pod=after)
    world.settle()
    assert world.deleted == []


def test_another_way_to_the_image_does_not_bring_another_default_image() -> None:
    world = settled()
    world.change_installation(trainer_image=NEW, trainer_image_pull_policy="Always")
    world.settle()
    assert f"--image={IMAGE}" in arguments(world)
    assert world.deleted == []


def test_a_pod_that_cannot_get_its_image_takes_another_way_at_once() -> None:
    world = settled(pod={"imagePullPolicy": "Never"})
    world.image_cannot_be_fetched()
    world.user_sets(pod={"imagePullPolicy": "IfNotPresent"})
    world.operate()
    world.controller_works()
    world.operate()
    assert "deletionTimestamp" in world.objects[POD]["metadata"]


# ---- what only the installation says


def test_other_settings_of_the_installation_wait_and_are_reported() -> None:
    world = settled()
    world.change_installation(**ROOT)
    world.settle()
    assert world.deleted == []
    assert (upgrade(world)["status"], upgrade(world)["reason"]) == ("True", "NewSettings")
    assert "--checkpoint-root=s3://elsewhere" in template(world)["spec"]["containers"][0]["args"]


@pytest.mark.parametrize("change", [ROOT, {"trainer_image": NEW}], ids=["settings", "image"])
def test_a_session_with_a_turn_restarts_and_returns_the_turn_when_it_is_ready(change: dict[str, Any]) -> None:
    world = settled()
    world.change_installation(**change)
    world.settle()
    assert world.decide().wants_turn
    world.has_turn = True
    world.operate()
    assert upgrade(world)["reason"] == "TakingItsTurn"
    while POD in world.objects and "deletionTimestamp" not in world.objects[POD]["metadata"]:
        world.operate()
        world.image_pull_works()
        world.controller_works()
    assert world.decide().wants_turn
    world.settle()
    assert not world.decide().wants_turn
    assert upgrade(world)["status"] == "False"
    said = " ".join(arguments(world))
    assert ("s3://elsewhere" in said) if change is ROOT else (f"--image={NEW}" in said)


def test_a_session_that_does_not_become_ready_keeps_its_turn() -> None:
    world = settled()
    world.change_installation(**ROOT)
    world.settle()
    world.has_turn = True
    for _ in range(20):
        world.operate()
        world.controller_works()
        world.kubelet_stops()
    assert world.decide().wants_turn
    assert upgrade(world)["reason"] == "TakingItsTurn"


@pytest.mark.parametrize("asks", ["annotation", "spec"])
def test_a_restart_by_the_user_needs_no_turn_and_applies_other_changes(asks: str) -> None:
    world = settled()
    world.change_installation(**ROOT)
    world.settle()
    if asks == "spec":
        world.user_sets(adapters={"slots": 4})
    else:
        world.user_annotates(RESTART_REQUEST_ANNOTATION, "2026-02-01T12:00:00Z")
    world.settle()
    assert "--checkpoint-root=s3://elsewhere" in arguments(world)
    assert not world.decide().wants_turn


def test_a_pod_of_an_earlier_operator_which_does_not_say_who_asked_is_restarted_as_it_was_then() -> None:
    world = settled()
    del world.objects[POD]["metadata"]["annotations"][SPEC_ANNOTATION]
    world.settle()
    assert world.deleted == []
    world.change_installation(**ROOT)
    world.settle()
    assert "--checkpoint-root=s3://elsewhere" in arguments(world)


LIFE = [
    lambda world: world.operate(),
    lambda world: world.operate(1),
    lambda world: world.controller_works(),
    lambda world: world.kubelet_starts(),
    lambda world: world.kubelet_stops(),
    lambda world: world.container_ends(exit_code=1),
    lambda world: setattr(world, "has_turn", True),
    lambda world: setattr(world, "has_turn", False),
    lambda world: world.change_installation(trainer_image=NEW),
    lambda world: world.change_installation(trainer_image=IMAGE),
    lambda world: world.change_installation(**ROOT),
    lambda world: world.change_installation(trainer_image_pull_policy="Always"),
    lambda world: world.user_sets(suspend=True),
    lambda world: world.user_sets(suspend=False),
]


@given(life=st.lists(st.sampled_from(LIFE), max_size=25))
@settings(max_examples=40, deadline=None)
def test_a_turn_always_ends_with_every_change_applied(life: list[Any]) -> None:
    world = settled()
    for each in life:
        each(world)
    world.user_sets(suspend=False)
    world.has_turn = True
    world.settle()
    assert not world.decide().wants_turn
    assert f"--image={world.installation.trainer_image}" in arguments(world)
    assert f"--checkpoint-root={world.installation.checkpoint_root}" in arguments(world)
    assert upgrade(world)["status"] == "False"


def test_a_session_that_must_have_no_pods_gives_its_turn_away() -> None:
    world = settled()
    world.change_installation(trainer_image=NEW)
    world.settle()
    world.has_turn = True
    assert world.decide().wants_turn
    world.claim_reader = "session older"
    world.settle()
    assert world.decide().wants_turn is False
