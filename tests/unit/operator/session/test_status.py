"""The times at which the status is written."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

from support.operator.resources import session_manifest
from support.operator.session_world import World
from tinsmith_operator.api.base import Manifest, format_time
from tinsmith_operator.common.actions import WriteStatus


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
