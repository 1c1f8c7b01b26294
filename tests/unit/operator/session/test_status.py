"""The times at which the status is written."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

from support.operator.resources import session_manifest
from support.operator.session_world import World
from tinsmith_operator.api.base import Manifest, format_time
from tinsmith_operator.common.actions import Emit, WriteStatus
from tinsmith_operator.common.conditions import FIRST_STATUS_WAIT
from tinsmith_operator.session.decision import REPORT_WAIT

DIGEST = "tinsmith.local/tinsmith/trainer@sha256:" + "ab" * 32


def test_conditions_of_others_and_their_order_are_no_reason_to_write() -> None:
    """No write of the operator would change either, so it would be repeated without end."""
    world = World(session_manifest())
    world.settle()
    assert world.session is not None
    conditions = world.session["status"]["conditions"]
    foreign_condition = {**conditions[0], "type": "example.com/Approved", "lastTransitionTime": format_time(world.now)}
    world.session["status"]["conditions"] = [foreign_condition, *reversed(conditions)]
    assert world.decide().actions == ()


def busy_world() -> World:
    """Return a settled session whose worker has reported one snapshot."""
    world = World(session_manifest())
    world.settle()
    world.worker_reports()
    world.settle()
    return world


def status_written_after(world: World, passed: timedelta, adapters_used: int = 0) -> Manifest | None:
    """Let the worker report a snapshot of this moment, and return the status that the operator writes then, if any."""
    assert world.report is not None
    world.now += passed
    world.report = replace(
        world.report, received_at=world.now, last_snapshot_time=world.now, adapters_used=adapters_used
    )
    return next((action.status for action in world.decide().actions if isinstance(action, WriteStatus)), None)


def test_a_worker_that_snapshots_all_the_time_has_its_status_written_every_ten_minutes() -> None:
    world = busy_world()
    written = [status_written_after(world, timedelta(minutes=1)) is not None for _ in range(10)]
    assert written == [False] * 9 + [True]


def test_a_status_that_is_written_for_another_reason_has_the_latest_time_of_a_snapshot() -> None:
    world = busy_world()
    written = status_written_after(world, timedelta(minutes=3), adapters_used=1)
    assert written is not None
    assert written["lastSnapshotTime"] == format_time(world.now.replace(second=0))


def begun_world() -> World:
    """Return a new session whose objects all exist."""
    world = World(session_manifest())
    world.default_image_digest = DIGEST
    while world.operate():
        pass
    assert ("StatefulSet", "qwen") in world.objects
    return world


def test_the_first_status_waits_a_moment_for_the_pod() -> None:
    world = begun_world()
    assert world.session is not None
    assert "status" not in world.session
    assert world.decide().requeue_after_seconds == FIRST_STATUS_WAIT.total_seconds()
    world.time_passes(FIRST_STATUS_WAIT)
    world.operate()
    assert world.session["status"]["conditions"][0]["status"] == "False"


def test_a_new_session_takes_seven_writes_if_its_pod_starts_at_once() -> None:
    world = World(session_manifest())
    world.default_image_digest = DIGEST
    actions = []
    for _ in range(8):
        actions += world.operate()
        world.cluster_works()
        world.worker_reports()
    kinds = [type(action).__name__ for action in actions if not isinstance(action, Emit)]
    assert sorted(kinds) == ["Create"] * 4 + ["IssueCertificate", "WriteStatus"]
    assert [event.reason for event in world.events] == ["WorkerReady"]


def test_the_status_of_a_ready_worker_waits_a_moment_for_its_first_report() -> None:
    world = begun_world()
    world.cluster_works()
    pod = world.objects["Pod", "qwen-0"]
    ready = next(each for each in pod["status"]["conditions"] if each["type"] == "Ready")
    ready["lastTransitionTime"] = format_time(world.now)
    assert world.decide().requeue_after_seconds == REPORT_WAIT.total_seconds()
    assert not any(isinstance(action, WriteStatus) for action in world.decide().actions)
    world.time_passes(REPORT_WAIT)
    world.operate()
    assert world.session is not None
    assert world.session["status"]["conditions"][0]["status"] == "True"


def test_a_refused_object_is_reported_at_once() -> None:
    world = World(session_manifest())
    world.refusals = {"StatefulSet": "no"}
    assert isinstance(world.decide().actions[0], WriteStatus)
