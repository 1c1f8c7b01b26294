"""Decisions bring any cluster to rest, and leave foreign objects alone.

The cluster is the one of support/operator/session_world.py. Each test lets a random world do its worst first.
"""

from __future__ import annotations

import copy
from datetime import timedelta

import pytest
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
    when_deleted,
)
from support.operator.resources import session_manifest
from support.operator.session_world import World
from tinsmith_operator.api.base import Manifest
from tinsmith_operator.api.names import (
    CONFIGURATION_ANNOTATION,
    IMAGE_ANNOTATION,
    INPUTS_ANNOTATION,
    SPEC_ANNOTATION,
)
from tinsmith_operator.common.observed import ReadJournal
from tinsmith_operator.session.upgrade import PIN_ANNOTATIONS

SETTINGS = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])

ON_A_JOURNAL = ReadJournal("spec.model.source.persistentVolumeClaim.claimName", "models", "ada")
OLD_IMAGE = "tinsmith.local/tinsmith/trainer:0.1.0"
NEW_IMAGE = "tinsmith.local/tinsmith/trainer:0.2.0"

specs = st.fixed_dictionaries(
    {
        "suspend": st.booleans(),
        "idle": st.sampled_from(
            [None, {"suspendAfterSeconds": 600}, {"suspendAfterSeconds": 60, "deleteAfterSeconds": 900}]
        ),
        "adapters": st.fixed_dictionaries({"slots": st.sampled_from([4, 8]), "maxRank": st.just(32)}),
        "sampling": st.sampled_from(["None", "Colocated"]),
        "resources": st.sampled_from([{}, {"requests": {"cpu": "2"}}, {"limits": {"memory": "4Gi"}}]),
        "pod": st.fixed_dictionaries(
            {
                "image": st.sampled_from([OLD_IMAGE, NEW_IMAGE, "registry.test/trainer:dev"]),
                "nodeSelector": st.sampled_from([{}, {"zone": "a"}]),
            }
        ),
        "storage": st.fixed_dictionaries({"retentionPolicy": when_deleted}),
    }
)

CHILDREN = [
    ("StatefulSet", "qwen"),
    ("Service", "qwen"),
    ("NetworkPolicy", "qwen"),
    ("Secret", "qwen-tls"),
    ("Pod", "qwen-0"),
]


def steps(*, refusals: bool = False) -> st.SearchStrategy[Step]:
    own = [
        step("controller", lambda world: world.controller_works()),
        step("binder", lambda world: world.binder_works()),
        step("kubelet_starts", lambda world: world.kubelet_starts()),
        step("kubelet_stops", lambda world: world.kubelet_stops()),
        step("crash", lambda world: world.container_ends(exit_code=1)),
        step("out_of_memory", lambda world: world.container_ends(exit_code=137, reason="OOMKilled")),
        step("hang", lambda world: world.worker_reports(running_seconds=10_000)),
        step("report", lambda world: world.worker_reports(adapters_used=3)),
        step("idle", lambda world: world.worker_reports(adapters_used=3, idle_seconds=700)),
        step("wanted", lambda world: world.a_server_wants_it(str(world.now))),
        step("day", lambda world: world.time_passes(timedelta(days=1))),
        step("month", lambda world: world.time_passes(timedelta(days=31))),
        step("another session has the claim", lambda world: setattr(world, "claim_holder", "ada")),
        step("it is gone", lambda world: setattr(world, "claim_holder", None)),
        step("its model is on a journal", lambda world: setattr(world, "read_journal", ON_A_JOURNAL)),
        step("on no journal", lambda world: setattr(world, "read_journal", None)),
        step("a pool has its model there", lambda world: setattr(world, "claim_reader", "pool ada")),
        step("no session reads the claim", lambda world: setattr(world, "claim_reader", None)),
    ]
    refusing = step("new image refuses", lambda world: world.refused_images.update({NEW_IMAGE: OLD_IMAGE}))
    return histories.steps(own + [refusing] * refusals, CHILDREN, specs)


def a_world(spec: Manifest | None = None) -> World:
    return World(session_manifest(**(spec or {})))


def live_through(world: World, life: list[Step]) -> None:
    histories.live_through(world, life)
    world.claim_holder = world.claim_reader = world.read_journal = None


def essence(world: World) -> Manifest:
    """Return the objects without history: without counters, times and earlier images."""
    objects = {place: _without_history(live) for place, live in world.objects.items()}
    if world.session is None:
        return {"objects": objects}
    status = world.session.get("status", {})
    conditions = {each["type"]: (each["status"], each["reason"]) for each in status.get("conditions", ())}
    return {"objects": objects, "conditions": conditions, "image": status.get("image")}


def _without_history(live: Manifest) -> Manifest:
    live = copy.deepcopy(live)
    metadata = live["metadata"]
    forgotten = {CONFIGURATION_ANNOTATION, INPUTS_ANNOTATION, SPEC_ANNOTATION} | (PIN_ANNOTATIONS - {IMAGE_ANNOTATION})
    for said in (metadata.get("annotations", {}), _template(live).get("annotations", {})):
        for name in forgotten & said.keys():
            del said[name]
    for number in ("uid", "resourceVersion", "generation", "creationTimestamp", "ownerReferences"):
        metadata.pop(number, None)
    live.pop("status", None)
    metadata["annotations"] = metadata.get("annotations", {})
    for spec in (live.get("spec", {}), live.get("spec", {}).get("template", {}).get("spec", {})):
        # Follows the measured time of snapshots.
        spec.pop("terminationGracePeriodSeconds", None)
        for container in spec.get("containers", ()):
            container["args"] = [each for each in container["args"] if not each.startswith("--worker-id=")]
            container.pop("image")  # tag or digest: which of the two depends on when it was first seen
    return live


def _template(live: Manifest) -> Manifest:
    template: Manifest = live.get("spec", {}).get("template", {}).get("metadata", {})
    return template


@given(life=st.lists(steps(), max_size=25))
@SETTINGS
def test_the_same_input_gives_the_same_decision(life: list[Step]) -> None:
    world = a_world()
    live_through(world, life)
    assert decides_alike_and_changes_nothing(world)


@given(life=st.lists(steps(refusals=True), max_size=30))
@SETTINGS
def test_the_operator_settles_from_every_state(life: list[Step]) -> None:
    world = a_world()
    live_through(world, life)
    world.settle()
    assert world.decide().actions == ()


@pytest.mark.parametrize(
    ("why", "who"), [("claim_holder", "ada"), ("claim_reader", "pool ada"), ("read_journal", ON_A_JOURNAL)]
)
@given(life=st.lists(steps(refusals=True), max_size=30))
@SETTINGS
def test_while_a_claim_of_its_is_anothers_it_rests_without_a_pod(why: str, who: object, life: list[Step]) -> None:
    world = a_world()
    live_through(world, life)
    setattr(world, why, who)
    world.settle()
    assert world.decide().actions == ()
    assert {kind for kind, _ in world.objects} & {"StatefulSet", "Pod"} == set()


@given(life=st.lists(steps(), max_size=30), last=specs)
@SETTINGS
def test_any_history_ends_where_the_last_spec_alone_leads(life: list[Step], last: Manifest) -> None:
    world, fresh = a_world(), a_world(last)
    live_through(world, life)
    world.user_sets(**last)
    world.settle()
    fresh.settle()
    assert essence(world) == essence(fresh)


@given(before=specs, after=specs, cut=st.integers(0, 6), at=st.integers(0, 12))
@SETTINGS
def test_dying_between_any_two_actions_changes_nothing_in_the_end(
    before: Manifest, after: Manifest, cut: int, at: int
) -> None:
    cut_short, undisturbed = a_world(before), a_world(before)
    come_to_rest_with_and_without_a_death(cut_short, undisturbed, after, cut=cut, at=at)
    assert essence(cut_short) == essence(undisturbed)


@given(
    life=st.lists(steps(), max_size=30),
    foreign=st.sampled_from([*CHILDREN, ("PersistentVolumeClaim", "qwen-journal")]),
)
@SETTINGS
def test_objects_of_other_owners_are_never_changed_by_a_session(life: list[Step], foreign: tuple[str, str]) -> None:
    world = a_world()
    foreign_object = a_foreign_object(world, foreign)
    others_steps = [each for each in life if str(foreign) not in each.__name__ and each.__name__ != "binder"]
    live_through(world, others_steps)
    for _ in range(10):
        world.operate()
        world.controller_works()
    left = world.objects[foreign]
    left.pop("status", None)
    foreign_object.pop("status", None)
    assert left == foreign_object
    assert world.session is not None
    assert world.session["status"]["conditions"][0]["reason"] == "NameConflict"


@given(life=st.lists(steps(), max_size=30))
@SETTINGS
def test_an_event_is_written_only_when_a_condition_has_changed(life: list[Step]) -> None:
    world = a_world()
    live_through(world, life)
    world.settle()
    assert tells_nothing_more(world)


@pytest.mark.parametrize("when_deleted", ["Retain", "Delete"])
@given(life=st.lists(steps(), max_size=20))
@SETTINGS
def test_a_deleted_session_leaves_its_claim_or_nothing(life: list[Step], when_deleted: str) -> None:
    world = a_world()
    live_through(world, life)
    world.user_sets(storage={"retentionPolicy": {"whenDeleted": when_deleted}}, suspend=False)
    world.settle()
    world.user_deletes_owner()
    world.settle(rounds=900)
    assert world.session is None
    assert list(world.objects) == ([("PersistentVolumeClaim", "qwen-journal")] if when_deleted == "Retain" else [])
