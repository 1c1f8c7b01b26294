"""Decisions lead any pool to its spec, and to rest.

The cluster is the one of support/operator/pool_world.py. Each test lets a random world do its worst first.
"""

from __future__ import annotations

import copy
from datetime import timedelta

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.operator import histories
from support.operator.histories import (
    Step,
    a_foreign_object,
    come_to_rest_with_and_without_a_death,
    decides_alike_and_changes_nothing,
    step,
    tells_nothing_more,
)
from support.operator.pool_world import PoolWorld
from support.operator.resources import pool_manifest
from tinsmith_operator.api.base import Manifest
from tinsmith_operator.api.names import RESTART_REQUEST_ANNOTATION
from tinsmith_operator.common.observed import ReadJournal

SETTINGS = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
ON_A_JOURNAL = ReadJournal("spec.model.source.persistentVolumeClaim.claimName", "models", "ada")
NEW_IMAGE = "tinsmith.local/tinsmith/trainer:0.2.0"

CHILDREN = [
    ("Deployment", "qwen-sampler"),
    ("Service", "qwen-sampler"),
    ("NetworkPolicy", "qwen-sampler"),
    ("PodDisruptionBudget", "qwen-sampler"),
    ("Secret", "qwen-sampler-tls"),
]

specs = st.fixed_dictionaries(
    {
        "replicas": st.integers(0, 3),
        "adapters": st.fixed_dictionaries({"maxLoaded": st.sampled_from([8, 64]), "maxRank": st.just(32)}),
        "resources": st.sampled_from([{}, {"requests": {"cpu": "2"}}]),
        "pod": st.fixed_dictionaries(
            {"nodeSelector": st.sampled_from([{}, {"zone": "a"}])},
            optional={"image": st.sampled_from([NEW_IMAGE, "registry.test/trainer:dev"])},
        ),
    }
)


def steps() -> st.SearchStrategy[Step]:
    own = [
        step("controller", lambda world: world.controller_works()),
        step("kubelet", lambda world: world.kubelet_works()),
        step("crash", lambda world: world.a_pod_crashes()),
        step("node lost", lambda world: world.a_node_is_lost()),
        step("day", lambda world: world.time_passes(timedelta(days=1))),
        step("month", lambda world: world.time_passes(timedelta(days=31))),
        step("its model is on a journal", lambda world: setattr(world, "read_journal", ON_A_JOURNAL)),
        step("on no journal", lambda world: setattr(world, "read_journal", None)),
        step("another default", lambda world: world.change_installation(trainer_image=NEW_IMAGE)),
    ]
    asking = st.integers(1, 3).map(lambda day: step(f"restart {day}", lambda world: ask_for_restart(world, day)))
    return histories.steps(own, CHILDREN, specs, asking)


def ask_for_restart(world: PoolWorld, day: int) -> None:
    world.user_annotates(RESTART_REQUEST_ANNOTATION, f"2026-02-0{day}T00:00:00Z")


def a_world(spec: Manifest | None = None) -> PoolWorld:
    return PoolWorld(pool_manifest(**(spec or {})))


def live_through(world: PoolWorld, life: list[Step]) -> None:
    histories.live_through(world, life)
    world.read_journal = None


def essence(world: PoolWorld) -> Manifest:
    """Return the objects without traces of their history."""
    children = {place: _comparable_spec(world.objects[place]) for place in CHILDREN if place in world.objects}
    pods = sorted(str(_comparable_spec(pod)["spec"]) for pod in world.pods())
    status = world.owner.get("status", {}) if world.owner is not None else {}
    conditions = {each["type"]: (each["status"], each["reason"]) for each in status.get("conditions", ())}
    numbers = {name: status.get(name) for name in ("replicas", "readyReplicas", "updatedReplicas")}
    return {"children": children, "pods": pods, "conditions": conditions, "numbers": numbers}


def _comparable_spec(live: Manifest) -> Manifest:
    spec = copy.deepcopy(live.get("spec", {}))
    metadata = spec.get("template", {}).get("metadata", {})
    for name in ("tinsmith.dev/inputs", RESTART_REQUEST_ANNOTATION):
        metadata.get("annotations", {}).pop(name, None)
    spec.pop("nodeName", None)
    return {"labels": live["metadata"]["labels"], "spec": spec}


@given(life=st.lists(steps(), max_size=25))
@SETTINGS
def test_the_same_input_gives_the_same_decision(life: list[Step]) -> None:
    world = a_world()
    live_through(world, life)
    assert decides_alike_and_changes_nothing(world)


@given(life=st.lists(steps(), max_size=30))
@SETTINGS
def test_the_operator_settles_from_every_state(life: list[Step]) -> None:
    world = a_world()
    live_through(world, life)
    world.settle()
    assert world.decide().actions == ()


@given(life=st.lists(steps(), max_size=30))
@SETTINGS
def test_a_pool_waits_without_a_pod_while_its_model_is_on_a_journal(life: list[Step]) -> None:
    world = a_world()
    live_through(world, life)
    world.user_sets(replicas=2)
    world.read_journal = ON_A_JOURNAL
    world.settle()
    assert (world.decide().actions, world.pods()) == ((), [])
    assert world.owner is not None
    assert world.owner["status"]["conditions"][0]["reason"] == "ClaimIsJournal"
    world.read_journal = None
    world.settle()
    assert len(world.pods()) == 2


@given(life=st.lists(steps(), max_size=30), last=specs, restart=st.just(7))
@SETTINGS
def test_any_history_ends_where_the_last_spec_alone_leads(life: list[Step], last: Manifest, restart: int) -> None:
    """A restart at the end is part of the history, since a pool keeps the image that it runs."""
    world, fresh = a_world(), a_world(last)
    live_through(world, life)
    fresh.installation = world.installation
    for each in (world, fresh):
        assert each.owner is not None
        each.owner["spec"].pop("pod", None)
        each.user_sets(**last)
        ask_for_restart(each, restart)
        each.settle()
    assert essence(world) == essence(fresh)


@given(before=specs, after=specs, cut=st.integers(0, 6), at=st.integers(0, 12))
@SETTINGS
def test_dying_between_any_two_actions_changes_nothing_in_the_end(
    before: Manifest, after: Manifest, cut: int, at: int
) -> None:
    cut_short, undisturbed = a_world(before), a_world(before)
    come_to_rest_with_and_without_a_death(cut_short, undisturbed, after, cut=cut, at=at)
    assert essence(cut_short) == essence(undisturbed)


@given(life=st.lists(steps(), max_size=30), foreign=st.sampled_from(CHILDREN))
@SETTINGS
def test_objects_of_other_owners_are_never_changed_by_a_pool(life: list[Step], foreign: tuple[str, str]) -> None:
    world = a_world()
    foreign_object = a_foreign_object(world, foreign)
    live_through(world, [each for each in life if str(foreign) not in each.__name__ and each.__name__ != "controller"])
    for _ in range(10):
        world.operate()
    assert world.objects[foreign] == foreign_object
    assert world.owner is not None
    assert world.owner["status"]["conditions"][0]["reason"] == "NameConflict"


@given(life=st.lists(steps(), max_size=30))
@SETTINGS
def test_an_event_is_written_only_after_a_change(life: list[Step]) -> None:
    world = a_world()
    live_through(world, life)
    world.settle()
    assert tells_nothing_more(world)


@given(life=st.lists(steps(), max_size=20))
@SETTINGS
def test_a_deleted_pool_leaves_nothing(life: list[Step]) -> None:
    world = a_world()
    live_through(world, life)
    world.user_deletes_owner()
    assert world.owner is None
    for _ in range(5):
        world.operate()
        world.collector_works()
        world.kubelet_works()
    assert [place for place in world.objects if place in CHILDREN] == []
