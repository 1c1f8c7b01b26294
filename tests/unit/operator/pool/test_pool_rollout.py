"""The changes that restart a pool's pods, and those that do not."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from support.operator.pool_world import PoolWorld
from support.operator.resources import IMAGE, pool_manifest
from tinsmith_operator.api.base import Manifest
from tinsmith_operator.api.names import CONFIGURATION_ANNOTATION, RESTART_REQUEST_ANNOTATION, SAMPLER_DNS_NAME

NEW_IMAGE = "tinsmith.local/tinsmith/trainer:0.2.0"
DEPLOYMENT = ("Deployment", "qwen-sampler")
ASKED = "2026-01-05T10:00:00Z"


def settled_world(**spec: Any) -> PoolWorld:
    world = PoolWorld(pool_manifest(**spec))
    world.settle()
    return world


def names(world: PoolWorld) -> list[str]:
    return [pod["metadata"]["name"] for pod in world.pods()]


def images(world: PoolWorld) -> set[str]:
    return {pod["spec"]["containers"][0]["image"] for pod in world.pods()}


def status(world: PoolWorld) -> Manifest:
    assert world.owner is not None
    found: Manifest = world.owner["status"]
    return found


def condition(world: PoolWorld, type_: str) -> Manifest:
    return next(each for each in status(world)["conditions"] if each["type"] == type_)


@pytest.mark.parametrize(
    "change",
    [
        {"adapters": {"maxLoaded": 8}},
        {"adapters": {"maxRank": 16}},
        {"maxSequenceLength": 4096},
        {"resources": {"requests": {"cpu": "2"}}},
        {"pod": {"image": NEW_IMAGE}},
        {"pod": {"env": [{"name": "A", "value": "1"}]}},
        {
            "pod": {
                "topologySpreadConstraints": [
                    {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}
                ]
            }
        },
    ],
    ids=lambda change: str(next(iter(change))),
)
def test_every_change_of_the_pods_by_a_user_rolls_them(change: Manifest) -> None:
    world = settled_world(replicas=2)
    before = names(world)
    world.user_sets(**change)
    world.settle()
    assert len(world.pods()) == 2
    assert not set(before) & set(names(world))


def test_a_scaled_pool_keeps_the_pods_that_stay() -> None:
    world = settled_world(replicas=1)
    before = names(world)
    world.user_sets(replicas=3)
    world.settle()
    assert set(before) < set(names(world))
    assert status(world)["readyReplicas"] == 3
    world.user_sets(replicas=0)
    world.settle()
    assert world.pods() == []


def test_another_default_image_waits_for_the_next_restart_and_says_so() -> None:
    world = settled_world()
    before = names(world)
    world.change_installation(trainer_image=NEW_IMAGE)
    world.settle()
    assert (names(world), status(world)["image"]) == (before, IMAGE)
    waits = condition(world, "UpgradeAvailable")
    assert (waits["status"], waits["reason"]) == ("True", "NewDefaultImage")
    assert NEW_IMAGE in waits["message"]
    world.user_annotates(RESTART_REQUEST_ANNOTATION, ASKED)
    world.settle()
    assert (images(world), status(world)["image"]) == ({NEW_IMAGE}, NEW_IMAGE)
    assert condition(world, "UpgradeAvailable")["status"] == "False"


def test_an_operator_that_builds_other_templates_rolls_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    world = settled_world()
    before = names(world)
    monkeypatch.setattr("tinsmith_operator.build.deployment.listen_options", lambda: {"listen": "0.0.0.0:1"})
    world.settle()
    assert names(world) == before
    assert world.decide().actions == ()


def test_an_edited_template_is_reverted() -> None:
    world = settled_world()
    before = copy.deepcopy(world.objects[DEPLOYMENT]["spec"])
    world.person_edits(DEPLOYMENT)
    assert world.objects[DEPLOYMENT]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] == 1
    world.settle()
    assert world.objects[DEPLOYMENT]["spec"] == before


def test_a_template_that_was_being_mended_when_the_operator_died_is_mended_by_the_next_one() -> None:
    """The field managers were already corrected, which breaks the seal; the fields were not."""
    world = settled_world()
    before = copy.deepcopy(world.objects[DEPLOYMENT]["spec"]["template"])
    world.person_edits(DEPLOYMENT)
    metadata = world.objects[DEPLOYMENT]["metadata"]
    del metadata["managedFields"], metadata["annotations"][CONFIGURATION_ANNOTATION]
    world.settle()
    assert world.objects[DEPLOYMENT]["spec"]["template"] == before


def test_a_restart_is_done_once_for_each_request_and_told_when_all_replicas_are_new() -> None:
    world = settled_world(replicas=2)
    before = names(world)
    world.user_annotates(RESTART_REQUEST_ANNOTATION, ASKED)
    world.operate()
    assert "requests" not in status(world)
    world.settle()
    after = names(world)
    assert not set(before) & set(after)
    assert status(world)["requests"] == {"restart": ASKED}
    assert [each.message for each in world.events if each.reason == "Restarted"] == [
        f"Every replica was restarted, as requested at {ASKED}."
    ]
    world.user_annotates(RESTART_REQUEST_ANNOTATION, None)
    world.settle()
    assert names(world) == after


def test_the_certificate_of_a_pool_names_its_uid_and_its_samplers_get_that_uid() -> None:
    world = settled_world()
    [secret] = [each for place, each in world.objects.items() if place[0] == "Secret"]
    facts = world.certificates[secret["metadata"]["uid"]]
    assert facts.dns_names == ("pool-uid.worker.tinsmith.internal", SAMPLER_DNS_NAME)
    [pod] = world.pods()
    assert "--worker-id=pool-uid" in pod["spec"]["containers"][0]["args"]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, {"imagePullPolicy": "Always"}),
        ({"imagePullPolicy": "Always"}, {}),
        ({}, {"imagePullSecrets": [{"name": "registry"}]}),
        ({"imagePullSecrets": [{"name": "registry"}]}, {"imagePullSecrets": [{"name": "other"}]}),
    ],
    ids=str,
)
def test_another_way_to_the_image_that_they_have_rolls_no_samplers(before: Manifest, after: Manifest) -> None:
    world = settled_world(pod=before)
    pods = names(world)
    world.user_sets(pod=after)
    world.settle()
    assert names(world) == pods


def test_samplers_that_cannot_get_their_image_take_another_way_at_once() -> None:
    world = settled_world()
    world.broken_images.add(IMAGE)
    world.user_sets(replicas=4)
    for _ in range(10):
        world.operate()
        world.cluster_works()
    world.broken_images.clear()
    world.user_sets(pod={"imagePullSecrets": [{"name": "registry"}]})
    world.settle()
    assert {str(pod["spec"].get("imagePullSecrets")) for pod in world.pods()} == {"[{'name': 'registry'}]"}
