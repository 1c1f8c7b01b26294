"""A restart or a snapshot that an annotation requests is done once for each time that the annotation names."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.operator.resources import session_manifest
from support.operator.session_world import World
from tinsmith_operator.api.names import RESTART_REQUEST_ANNOTATION, SNAPSHOT_REQUEST_ANNOTATION
from tinsmith_operator.api.training_session import parse_session
from tinsmith_operator.common.observed import SnapshotAnswer
from tinsmith_operator.common.requests import is_time, snapshot_request

POD = ("Pod", "qwen-0")
FIRST, SECOND = "2026-02-01T12:00:00Z", "2026-02-01T13:00:00.5+02:00"
UNREADABLE = [
    "",
    "now",
    "yesterday",
    "2026-02-30T12:00:00Z",
    "2026-02-01",
    "2026-02-01 12:00:00Z",
    "2026-02-01T12:00:00",
]


def settled_world(**spec: Any) -> World:
    world = World(session_manifest(**spec))
    world.settle()
    return world


def status(world: World) -> dict[str, Any]:
    assert world.session is not None
    found: dict[str, Any] = world.session["status"]
    return found


def restarts(world: World) -> int:
    return [each["kind"] for each in world.deleted].count("Pod")


def messages(world: World, reason: str) -> list[str]:
    return [event.message for event in world.events if event.reason == reason]


def pending(world: World) -> str | None:
    assert world.session is not None
    return snapshot_request(parse_session(world.session))


# ---- restarts


def test_a_restart_is_a_clean_stop_and_is_done_once() -> None:
    world = settled_world()
    world.user_annotates(RESTART_REQUEST_ANNOTATION, FIRST)
    world.settle()
    world.settle()
    assert restarts(world) == 1
    assert status(world)["requests"] == {"restart": FIRST}
    assert messages(world, "Restarted") == [f"The worker was restarted, as requested at {FIRST}."]


def test_taking_the_annotation_away_restarts_nothing_and_nor_does_its_return() -> None:
    world = settled_world()
    for value in (FIRST, None, FIRST):
        world.user_annotates(RESTART_REQUEST_ANNOTATION, value)
        world.settle()
    assert restarts(world) == 1


def test_a_pod_that_was_started_since_needs_no_restart() -> None:
    world = settled_world()
    world.user_annotates(RESTART_REQUEST_ANNOTATION, FIRST)
    world.operate()
    world.person_deletes(POD)
    world.deleted.clear()
    world.settle()
    assert restarts(world) == 0
    assert status(world)["requests"] == {"restart": FIRST}


def test_a_session_that_comes_with_the_annotation_is_started_once() -> None:
    manifest = session_manifest()
    manifest["metadata"]["annotations"] = {RESTART_REQUEST_ANNOTATION: FIRST}
    world = World(manifest)
    world.settle()
    assert restarts(world) == 0
    assert status(world)["requests"] == {"restart": FIRST}


def test_a_worker_in_a_crash_loop_can_be_restarted() -> None:
    world = settled_world()
    world.container_ends(exit_code=1)
    world.user_annotates(RESTART_REQUEST_ANNOTATION, FIRST)
    world.settle()
    assert restarts(world) == 1


def test_a_repaired_statefulset_does_not_repeat_a_restart() -> None:
    world = settled_world()
    world.user_annotates(RESTART_REQUEST_ANNOTATION, FIRST)
    world.settle()
    pod = world.objects[POD]["metadata"]["uid"]
    world.person_edits(("StatefulSet", "qwen"))
    world.operate()
    world.settle()
    assert world.objects[POD]["metadata"]["uid"] == pod
    assert restarts(world) == 1


# ---- snapshots


def test_a_request_for_a_snapshot_waits_for_the_worker() -> None:
    world = settled_world()
    world.user_annotates(SNAPSHOT_REQUEST_ANNOTATION, FIRST)
    world.settle()
    assert pending(world) == FIRST
    assert "requests" not in status(world)


def test_an_answer_has_a_time_that_is_not_before_the_snapshot() -> None:
    world = settled_world()
    world.user_annotates(SNAPSHOT_REQUEST_ANNOTATION, FIRST)
    world.snapshot = SnapshotAnswer(FIRST, datetime(2026, 2, 1, 12, 0, 0, 300_000, tzinfo=UTC))
    world.settle()
    assert pending(world) is None
    assert status(world)["requests"] == {"snapshot": FIRST}
    assert status(world)["lastSnapshotTime"] == "2026-02-01T12:00:01Z"
    assert len(messages(world, "SnapshotTaken")) == 1


def test_the_time_stays_when_the_worker_reports_an_older_snapshot_because_nothing_had_changed() -> None:
    world = settled_world()
    world.worker_reports()
    world.settle()
    before = status(world)["lastSnapshotTime"]
    world.user_annotates(SNAPSHOT_REQUEST_ANNOTATION, FIRST)
    world.snapshot = SnapshotAnswer(FIRST, world.now + timedelta(seconds=90))
    world.settle()
    after = status(world)["lastSnapshotTime"]
    assert after > before
    world.worker_reports()
    world.settle()
    assert status(world)["lastSnapshotTime"] == after


def test_a_worker_that_cannot_snapshot_is_quoted_once() -> None:
    world = settled_world()
    world.user_annotates(SNAPSHOT_REQUEST_ANNOTATION, FIRST)
    world.snapshot = SnapshotAnswer(FIRST, None, "its image is too old")
    world.settle()
    world.settle()
    assert pending(world) is None
    [message] = messages(world, "SnapshotRefused")
    assert "its image is too old" in message
    assert "lastSnapshotTime" not in status(world)


# ---- what cannot be read


@pytest.mark.parametrize("annotation", [RESTART_REQUEST_ANNOTATION, SNAPSHOT_REQUEST_ANNOTATION])
@pytest.mark.parametrize("value", UNREADABLE)
def test_a_request_without_a_valid_time_is_reported_once_and_has_no_effect(annotation: str, value: str) -> None:
    world = settled_world()
    world.user_annotates(annotation, value)
    world.settle()
    world.settle()
    assert restarts(world) == 0
    assert pending(world) is None
    [message] = messages(world, "RequestUnreadable")
    assert annotation in message
    assert "such as 2026-01-31T12:00:00Z" in message


@given(st.datetimes(timezones=st.just(UTC)))
def test_every_time_format_of_kubernetes_is_a_time(moment: datetime) -> None:
    assert is_time(moment.strftime("%Y-%m-%dT%H:%M:%SZ").rjust(20, "0"))
    assert is_time(moment.isoformat(timespec="microseconds"))
