"""Idle sessions and pools are suspended, woken and deleted as their spec says, and never while a client uses them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.operator.pool_world import PoolWorld
from support.operator.resources import NOW, pool_manifest, session_manifest
from support.operator.session_world import World
from tinsmith_operator.api.base import Manifest
from tinsmith_operator.api.names import WAKE_REQUEST_ANNOTATION
from tinsmith_operator.api.status import IdleState
from tinsmith_operator.api.training_session import TrainingSession, parse_session
from tinsmith_operator.common.idleness import Use, assess_idleness, is_due, use_of
from tinsmith_operator.common.observed import WorkerReport
from tinsmith_operator.metrics import gpus_of, idle_seconds

POLICY = {"suspendAfterSeconds": 600}


def session_of(status: Manifest | None = None, *, wanted: str | None = None, **spec: Any) -> TrainingSession:
    manifest = session_manifest(**{"idle": POLICY, **spec})
    manifest["status"] = {**({"idle": status} if status is not None else {})}
    if wanted is not None:
        manifest["status"]["wantedTime"] = wanted
    return parse_session(manifest)


def used(seconds_ago: float, *, reported_ago: float = 0.0) -> Use:
    reported = NOW - timedelta(seconds=reported_ago)
    return Use(reported - timedelta(seconds=seconds_ago), reported)


def state_of(session: TrainingSession, use: Use | None) -> IdleState:
    state = assess_idleness(session, use, NOW)
    assert state is not None
    return state


def ready_world(**spec: Any) -> World:
    world = World(session_manifest(**{"idle": POLICY, **spec}))
    world.settle()
    return world


def idle_for(world: World, seconds: float, *, adapters_used: int = 0) -> None:
    """Let the worker report twice: once for the time since when it is idle, and once at the end."""
    world.worker_reports(adapters_used=adapters_used, idle_seconds=70)
    world.settle()
    world.time_passes(timedelta(seconds=seconds - 70))
    world.worker_reports(adapters_used=adapters_used, idle_seconds=seconds)
    world.settle()


def ready_of(world: World | PoolWorld) -> tuple[str, str]:
    assert world.owner is not None
    ready = next(each for each in world.owner["status"]["conditions"] if each["type"] == "Ready")
    return ready["status"], ready["reason"]


def test_an_idle_session_is_suspended_and_its_spec_stays() -> None:
    world = ready_world()
    spec = dict((world.owner or {})["spec"])
    idle_for(world, 601)
    assert ready_of(world) == ("False", "Idle")
    assert world.get("Pod", "qwen-0") is None
    assert world.owner is not None
    assert world.owner["spec"] == spec


@pytest.mark.parametrize("by", ["an API server", "a user"])
def test_a_wake_request_starts_the_session_again(by: str) -> None:
    world = ready_world()
    idle_for(world, 601)
    if by == "a user":
        world.user_annotates(WAKE_REQUEST_ANNOTATION, "2026-01-02T03:20:00Z")
    else:
        world.a_server_wants_it("2026-01-02T03:20:00.123456Z")
    world.settle()
    assert ready_of(world) == ("True", "WorkerReady")


def test_the_removal_of_a_wake_request_wakes_nothing() -> None:
    world = ready_world()
    world.a_server_wants_it("2026-01-02T03:00:00.123456Z")
    world.user_annotates(WAKE_REQUEST_ANNOTATION, "2026-01-02T03:00:00Z")
    world.settle()
    idle_for(world, 800)
    assert ready_of(world) == ("False", "Idle")
    world.user_annotates(WAKE_REQUEST_ANNOTATION, None)
    world.settle()
    assert ready_of(world) == ("False", "Idle")


def test_a_wake_request_counts_although_the_clock_of_its_sender_is_wrong() -> None:
    world = ready_world()
    idle_for(world, 601)
    world.a_server_wants_it("1999-01-01T00:00:00.000000Z")
    world.settle()
    assert ready_of(world) == ("True", "WorkerReady")


def test_the_last_report_of_a_stopping_pod_does_not_suspend_the_session_again() -> None:
    woken = session_of({"suspendedTime": "2026-01-02T03:00:00Z", "since": "2026-01-02T02:00:00Z"}, wanted="now")
    state = state_of(woken, used(3600))
    assert state.suspended_time is None
    again = state_of(session_of({"since": "2026-01-02T03:04:05Z", "wakeRequest": "now"}, wanted="now"), used(3600))
    assert again.suspended_time is None


def test_a_session_is_not_suspended_by_an_old_report() -> None:
    waits = session_of({"since": "2026-01-02T02:00:00Z"})
    assert state_of(waits, used(3600, reported_ago=30)).suspended_time is None
    assert state_of(waits, None).suspended_time is None
    assert state_of(waits, used(3600)).suspended_time is not None


def test_a_session_without_a_report_is_not_idle() -> None:
    world = ready_world()
    world.time_passes(timedelta(days=1))
    world.settle()
    assert ready_of(world) == ("True", "WorkerReady")


def test_short_pauses_of_a_client_write_nothing() -> None:
    world = ready_world()
    world.worker_reports()
    world.settle()
    for pause in (0.0, 20.0, 59.0, 3.0):
        world.time_passes(timedelta(seconds=60))
        world.worker_reports(idle_seconds=pause)
        assert world.decide().actions == ()


def test_a_session_that_a_user_has_suspended_is_not_woken() -> None:
    world = ready_world(suspend=True)
    world.a_server_wants_it("2026-01-02T03:20:00.123456Z")
    world.settle()
    assert ready_of(world) == ("False", "Suspended")


def test_without_a_policy_nothing_is_suspended() -> None:
    world = ready_world(idle=None)
    idle_for(world, 100_000)
    assert ready_of(world) == ("True", "WorkerReady")


def test_a_session_without_models_is_deleted_after_its_time() -> None:
    world = ready_world(idle={"suspendAfterSeconds": 600, "deleteAfterSeconds": 3600})
    idle_for(world, 601)
    world.time_passes(timedelta(seconds=3000))
    world.settle()
    assert world.owner is None
    assert [event.reason for event in world.events][-1] == "DeletedWhileIdle"


def test_a_session_with_models_of_a_living_client_is_not_deleted() -> None:
    world = ready_world(idle={"suspendAfterSeconds": 600, "deleteAfterSeconds": 3600})
    idle_for(world, 601, adapters_used=1)
    world.time_passes(timedelta(days=30))
    world.settle()
    assert ready_of(world) == ("False", "Idle")


def test_a_session_that_a_user_has_suspended_is_not_deleted_as_idle() -> None:
    world = ready_world(idle={"suspendAfterSeconds": 600, "deleteAfterSeconds": 3600})
    idle_for(world, 601)
    world.user_sets(suspend=True)
    world.time_passes(timedelta(days=1))
    world.settle()
    assert world.owner is not None


def test_a_session_past_its_deadline_is_deleted_after_its_idle_time() -> None:
    world = ready_world(idle={"deleteAfterSeconds": 3600}, activeDeadlineSeconds=60)
    world.worker_reports()
    world.settle()
    world.time_passes(timedelta(seconds=61))
    world.settle()
    assert ready_of(world) == ("False", "DeadlineExceeded")
    world.time_passes(timedelta(seconds=3601))
    world.settle()
    assert world.owner is None


def test_the_next_look_is_at_the_time_of_the_deletion() -> None:
    world = ready_world(idle={"suspendAfterSeconds": 600, "deleteAfterSeconds": 3600})
    idle_for(world, 601)
    assert world.decide().requeue_after_seconds == pytest.approx(3600 - 601, abs=2)


def test_a_deadline_stops_the_session_and_a_higher_one_starts_it_again() -> None:
    world = ready_world(idle=None, activeDeadlineSeconds=3600)
    assert world.decide().requeue_after_seconds == pytest.approx(3600, abs=60)
    world.time_passes(timedelta(seconds=3601))
    world.settle()
    assert ready_of(world) == ("False", "DeadlineExceeded")
    world.user_sets(activeDeadlineSeconds=7200)
    world.settle()
    assert ready_of(world) == ("True", "WorkerReady")


def test_a_pool_is_suspended_when_all_its_replicas_are_idle() -> None:
    world = PoolWorld(pool_manifest(idle=POLICY, replicas=2))
    world.settle()
    world.replicas_report(idle_seconds=70)
    world.settle()
    world.time_passes(timedelta(seconds=600))
    world.replicas_report(idle_seconds=670)
    busy = next(iter(world.reports))
    world.reports[busy] = WorkerReport(busy, world.now, 0, 0, 64, 0.0, 0.0, None, False, 0.0)
    world.settle()
    assert ready_of(world) == ("True", "ReplicasReady")
    world.replicas_report(idle_seconds=670)
    world.settle()
    world.time_passes(timedelta(seconds=600))
    world.replicas_report(idle_seconds=1270)
    world.settle()
    assert ready_of(world) == ("False", "Idle")
    assert world.pods() == []
    assert world.owner is not None
    assert world.owner["spec"]["replicas"] == 2
    world.a_server_wants_it("2026-01-02T03:20:00.123456Z")
    world.settle()
    assert ready_of(world) == ("True", "ReplicasReady")
    assert len(world.pods()) == 2


def test_a_pool_with_a_replica_that_has_not_reported_is_not_idle() -> None:
    world = PoolWorld(pool_manifest(idle=POLICY, replicas=2))
    world.settle()
    world.replicas_report(idle_seconds=10_000)
    world.reports.popitem()
    assert world.decide().actions == ()


def test_replicas_are_asked_closely_when_the_status_says_that_the_time_is_over() -> None:
    assert not is_due(session_of({"since": "2026-01-02T03:00:00Z"}), NOW)
    assert is_due(session_of({"since": "2026-01-02T02:54:05Z"}), NOW)
    asleep = {"since": "2026-01-02T02:00:00Z", "suspendedTime": "2026-01-02T03:00:00Z"}
    assert not is_due(session_of(asleep), NOW)


reports = st.lists(
    st.builds(
        lambda age, idle: WorkerReport(
            "pod", NOW - timedelta(seconds=age), 1, 0, 8, 0.0, 0.0, None, volume_full=False, idle_seconds=idle
        ),
        st.floats(0, 100),
        st.floats(0, 5000),
    ),
    max_size=4,
)
statuses = st.fixed_dictionaries(
    {},
    optional={
        "since": st.sampled_from(["2026-01-02T02:00:00Z", "2026-01-02T03:04:00Z"]),
        "wakeRequest": st.sampled_from(["a", "b"]),
        "suspendedTime": st.just("2026-01-02T03:00:00Z"),
    },
)


@given(reports, statuses, st.sampled_from([None, "a", "b"]))
def test_only_a_long_idleness_that_is_reported_now_suspends(
    described: list[WorkerReport], status: Manifest, wanted: str | None
) -> None:
    session = session_of(status, wanted=wanted)
    state = state_of(session, use_of(described))
    if wanted is not None and wanted != status.get("wakeRequest"):
        assert state.suspended_time is None
    elif state.suspended_time is not None and "suspendedTime" not in status:
        assert described
        assert min(report.received_at for report in described) >= NOW - timedelta(seconds=10)
        assert min(report.idle_seconds for report in described) >= 50
        assert state.since is not None
        assert NOW - state.since >= timedelta(seconds=600)


def test_the_gpu_seconds_of_all_suspensions_are_counted() -> None:
    world = ready_world(resources={"limits": {"nvidia.com/gpu": 2}})
    idle_for(world, 601)
    world.time_passes(timedelta(seconds=100))
    assert world.owner is not None
    assert gpus_of(world.owner) * idle_seconds(world.owner, world.now) == pytest.approx(200, abs=4)
    world.a_server_wants_it("now")
    world.settle()
    world.time_passes(timedelta(seconds=100))
    assert gpus_of(world.owner) * idle_seconds(world.owner, world.now) == pytest.approx(200, abs=4)
