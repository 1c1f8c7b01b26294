"""When the status is written."""

from __future__ import annotations

from support.operator.resources import session_manifest
from support.operator.session_world import World
from tinsmith_operator.api.base import format_time


def test_conditions_of_others_and_their_order_are_no_reason_to_write() -> None:
    """No write of ours would change either, so it would be repeated for ever."""
    world = World(session_manifest())
    world.settle()
    assert world.session is not None
    conditions = world.session["status"]["conditions"]
    theirs = {**conditions[0], "type": "example.com/Approved", "lastTransitionTime": format_time(world.now)}
    world.session["status"]["conditions"] = [theirs, *reversed(conditions)]
    assert world.decide().actions == ()
