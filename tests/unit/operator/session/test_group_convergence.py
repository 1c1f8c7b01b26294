"""The pods of a multi-node session end as one group that serves, whatever happens to them.

The cluster is the one of support/operator/group_world.py, whose head never serves with a member of an earlier run.
"""

from __future__ import annotations

from datetime import timedelta

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.operator import histories
from support.operator.built_sessions import NEMO_RL
from support.operator.group_world import GroupWorld
from support.operator.histories import Step, decides_alike_and_changes_nothing, step, tells_nothing_more, when_deleted
from support.operator.resources import session_manifest
from tinsmith_operator.api.base import Manifest
from tinsmith_operator.api.names import INPUTS_ANNOTATION, RESTART_REQUEST_ANNOTATION
from tinsmith_operator.common.pod import Pod

SETTINGS = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
NODES = 3
DIVIDED: Manifest = {**NEMO_RL, "parallelism": {"nodes": NODES}, "modelCache": {"claimName": "models"}}
IMAGES = [NEMO_RL["pod"]["image"], "tinsmith.local/tinsmith/trainer-nemo-rl:0.2.0"]

specs = st.fixed_dictionaries(
    {
        "suspend": st.booleans(),
        "adapters": st.fixed_dictionaries({"slots": st.sampled_from([4, 8]), "maxRank": st.just(32)}),
        "pod": st.fixed_dictionaries({"image": st.sampled_from(IMAGES)}),
        "storage": st.fixed_dictionaries({"retentionPolicy": when_deleted}),
    }
)
CHILDREN = [
    ("Job", "qwen-conversion"),
    ("RayCluster", "qwen"),
    ("Service", "qwen"),
    ("NetworkPolicy", "qwen"),
    ("Secret", "qwen-tls"),
    ("Pod", "qwen-head-x7k2p"),
]


def steps() -> st.SearchStrategy[Step]:
    own = [
        step("kuberay", lambda world: world.controller_works()),
        step("binder", lambda world: world.binder_works()),
        step("kubelet_starts", lambda world: world.kubelet_starts()),
        step("kubelet_stops", lambda world: world.kubelet_stops()),
        step("crash", lambda world: world.container_ends(exit_code=1)),
        step("lost member", lambda world: world.member_is_lost()),
        step("hang", lambda world: world.worker_reports(running_seconds=10_000)),
        step("job controller", lambda world: world.job_controller_works()),
        step("conversion fails", lambda world: world.conversion_ends("Failed", exitCode=1)),
        step("converts", lambda world: world.conversion_works()),
        step("month", lambda world: world.time_passes(timedelta(days=31))),
        step("kuberay goes", lambda world: setattr(world, "kuberay", False)),
        step("kuberay comes", lambda world: setattr(world, "kuberay", True)),
    ]
    return histories.steps(own, CHILDREN, specs)


def a_world(spec: Manifest | None = None) -> GroupWorld:
    return GroupWorld(session_manifest(**{**DIVIDED, **(spec or {})}))


def live_through(world: GroupWorld, life: list[Step]) -> None:
    histories.live_through(world, life)
    world.kuberay = True


def reason(world: GroupWorld) -> str:
    assert world.session is not None
    said: str = world.session["status"]["conditions"][0]["reason"]
    return said


@given(life=st.lists(steps(), max_size=30))
@SETTINGS
def test_the_same_input_gives_the_same_decision(life: list[Step]) -> None:
    world = a_world()
    live_through(world, life)
    assert decides_alike_and_changes_nothing(world)


@given(life=st.lists(steps(), max_size=30), begun=st.booleans(), suspend=st.booleans())
@SETTINGS
def test_any_history_ends_with_a_group_of_one_run_or_with_none(life: list[Step], begun: bool, suspend: bool) -> None:
    world = a_world()
    if begun:
        world.settle(rounds=90)
    live_through(world, life)
    world.user_sets(suspend=suspend)
    world.settle(rounds=90)
    assert world.decide().actions == ()
    if reason(world) == "ConversionFailed":
        world.user_annotates(RESTART_REQUEST_ANNOTATION, "2026-01-31T12:00:00Z")
        world.settle(rounds=90)
    pods = [pod for place, pod in world.objects.items() if place[0] == "Pod" and pod not in world.converters()]
    if suspend:
        assert (reason(world), pods) == ("Suspended", [])
        return
    assert reason(world) == "WorkerReady"
    assert len(pods) == NODES
    assert len({pod["metadata"]["annotations"][INPUTS_ANNOTATION] for pod in pods}) == 1
    assert len({world.joined[member["metadata"]["uid"]] for member in world.members()}) == 1


@given(life=st.lists(steps(), max_size=15), image=st.sampled_from(IMAGES), converts_after=st.integers(0, 20))
@SETTINGS
@pytest.mark.slow("tries every cut point of a group")
def test_no_pod_of_a_group_begins_before_the_model_is_converted_with_its_image(
    life: list[Step], image: str, converts_after: int
) -> None:
    """Histories in which another user deletes the operator's objects or starts the pods are excluded."""
    world = a_world()
    undisturbed = [one for one in life if not one.__name__.startswith(("delete", "edit"))]
    live_through(world, undisturbed)
    world.user_sets(suspend=False, pod={"image": image})
    for round_ in range(30):
        world.operate()
        for work in (world.controller_works, world.binder_works, world.kubelet_stops):
            work()
        if round_ >= converts_after:
            world.conversion_works()
        head = world.objects.get(("Pod", "qwen-head-x7k2p"))
        assert head is None or Pod(head).journal_image in world.converted_with


@given(life=st.lists(steps(), max_size=30))
@SETTINGS
def test_an_event_is_written_only_when_a_condition_has_changed(life: list[Step]) -> None:
    world = a_world()
    live_through(world, life)
    world.settle(rounds=90)
    assert tells_nothing_more(world)


@pytest.mark.parametrize("when_deleted", ["Retain", "Delete"])
@given(life=st.lists(steps(), max_size=20))
@SETTINGS
def test_a_deleted_session_leaves_its_claim_or_nothing(life: list[Step], when_deleted: str) -> None:
    world = a_world()
    live_through(world, life)
    world.user_sets(storage={"retentionPolicy": {"whenDeleted": when_deleted}}, suspend=False)
    world.settle(rounds=90)
    world.user_deletes_owner()
    world.settle(rounds=900)
    assert world.session is None
    assert list(world.objects) == ([("PersistentVolumeClaim", "qwen-journal")] if when_deleted == "Retain" else [])
