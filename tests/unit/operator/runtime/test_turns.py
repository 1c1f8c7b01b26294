"""Only a few sessions restart automatically at the same time; a policy sets the number and the hours."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.operator.resources import session_manifest
from tinsmith_operator.kube.cache import Cache
from tinsmith_operator.kube.resources import SESSIONS, Key
from tinsmith_operator.restarts import RestartPolicy, parse_policy, parse_window
from tinsmith_operator.runtime.turns import Turns

MONDAY = datetime(2026, 1, 5, 12, 0, tzinfo=UTC)


class Sessions:
    """A number of sessions that take restart slots."""

    def __init__(self, count: int, policy: RestartPolicy, *, taking: int = 0) -> None:
        self.now = MONDAY
        self.cache = Cache(lambda _key: None)
        self.keys = [Key("research", f"s{number}", SESSIONS.kind) for number in range(count)]
        for number, key in enumerate(self.keys):
            self.cache.note(a_session(key, version=number + 1, taking=number < taking))
        self.policy = policy
        self.enqueued: list[Key] = []
        self.turns = self.new_leader()

    def new_leader(self) -> Turns:
        return Turns(self.policy, self.cache, self.enqueued.append, lambda: self.now)

    def all_want(self) -> None:
        for key in self.keys:
            self.turns.note(key, wants=True)

    @property
    def holders(self) -> list[str]:
        return [key.name for key in self.keys if self.turns.has(key)]


def a_session(key: Key, *, version: int, taking: bool = False) -> dict[str, Any]:
    manifest = session_manifest(key.name)
    manifest["metadata"] |= {"uid": f"uid-{key.name}", "resourceVersion": str(version)}
    reason = "TakingItsTurn" if taking else "NewDefaultImage"
    manifest["status"] = {"conditions": [{"type": "UpgradeAvailable", "status": "True", "reason": reason}]}
    return manifest


def automatic(budget: str = "1", window: str = "") -> RestartPolicy:
    return parse_policy(automatic=True, budget=budget, window=window)


def test_the_next_leader_counts_restarts_that_have_begun() -> None:
    sessions = Sessions(4, automatic("2"), taking=2)
    sessions.all_want()
    assert (sessions.holders, sessions.enqueued) == (["s0", "s1"], [])
    sessions.turns.note(sessions.keys[0], wants=False)
    assert sessions.holders == ["s1", "s2"]


def test_a_leader_that_regains_the_lease_reads_again_which_restarts_have_begun() -> None:
    sessions = Sessions(3, automatic())
    sessions.all_want()
    sessions.turns.end()
    sessions.cache.note(a_session(sessions.keys[2], version=100, taking=True))
    sessions.all_want()
    assert sessions.holders == ["s2"]


def test_turns_begin_only_while_the_window_is_open_and_end_whenever_they_end() -> None:
    sessions = Sessions(3, automatic(window="Mon 14:00-15:00"))
    sessions.all_want()
    assert sessions.holders == []
    sessions.now = MONDAY.replace(hour=14)
    sessions.turns.note(sessions.keys[1], wants=True)
    assert sessions.holders == ["s0"]
    sessions.now = MONDAY.replace(hour=15)
    assert sessions.turns.has(sessions.keys[0])
    sessions.turns.note(sessions.keys[0], wants=False)
    assert sessions.holders == []


@given(steps=st.lists(st.tuples(st.integers(0, 7), st.booleans()), max_size=60), budget=st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_the_budget_always_holds_and_no_session_waits_while_a_turn_is_free(
    steps: list[tuple[int, bool]], budget: int
) -> None:
    sessions = Sessions(8, automatic(str(budget)))
    wanting: set[str] = set()
    for number, wants in steps:
        key = sessions.keys[number]
        sessions.turns.note(key, wants=wants)
        wanting = wanting | {key.name} if wants else wanting - {key.name}
        assert len(sessions.holders) == min(budget, len(wanting))
        assert set(sessions.holders) <= wanting


@pytest.mark.parametrize(
    ("window", "day", "clock", "is_open"),
    [
        ("02:00-05:00", 5, "02:00", True),
        ("02:00-05:00", 5, "05:00", False),
        ("Sat,Sun 02:00-05:00", 9, "03:00", False),
        ("Sat,Sun 02:00-05:00", 10, "03:00", True),
        ("Sun 22:00-04:00", 11, "23:59", True),
        ("Sun 22:00-04:00", 12, "03:59", True),
        ("Sun 22:00-04:00", 12, "04:00", False),
        ("Sun 22:00-04:00", 11, "03:00", False),
        ("Mon 00:00-24:00", 5, "23:59", True),
    ],
)
def test_when_a_window_is_open(window: str, day: int, clock: str, is_open: bool) -> None:
    hour, minute = map(int, clock.split(":"))
    assert parse_window(window).is_open(datetime(2026, 1, day, hour, minute, tzinfo=UTC)) is is_open


@pytest.mark.parametrize(
    "text", ["nights", "2-5", "25:00-26:00", "Mo 02:00-05:00", "02:00-02:00", "24:30-25:00", "Sat"]
)
def test_an_invalid_window_is_reported_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="window"):
        parse_window(text)


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "101%", "0%", "ten", ""])
def test_an_invalid_budget_is_reported_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="use a number of at least 1, or a share such as 10%"):
        parse_policy(automatic=False, budget=text, window="")
