"""Recordings of agents: turns are numbered once, whichever replica adds them, and end with their recording."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import timedelta

import pytest
from support.server.store_records import NOW, later
from tinsmith_server.store.records import RecordedTurn, Recording
from tinsmith_server.store.store import Store

pytestmark = pytest.mark.core


def a_recording(name: str = "rec-1", tenant: str = "ada") -> Recording:
    return Recording(name, tenant, "tiny", NOW, NOW + timedelta(hours=1), most_turns=4, most_bytes=1000)


def a_turn(recording_id: str = "rec-1", parent: int | None = None) -> RecordedTurn:
    return RecordedTurn(
        recording_id=recording_id,
        number=0,
        parent=parent,
        reason="first",
        model_path="tiny",
        weights_digest="",
        finish_reason="stop",
        sampling={"temperature": 1.0},
        started_at=NOW,
        ended_at=later(1),
        settings_digest=b"s" * 16,
        message_digests=b"m" * 32,
        reasoning=b"a\0b",
        prompt_tokens=b"\x01\0\0\0",
        sampled_tokens=b"\x02\0\0\0",
        logprobs=b"\0\0\0\0",
    )


async def numbers(store: Store, recording_id: str = "rec-1") -> Sequence[int]:
    return [turn.number for turn in await store.recorded_turns(recording_id)]


async def test_turns_of_two_replicas_get_different_numbers_and_count_into_the_size(
    replicas: tuple[Store, Store],
) -> None:
    await replicas[0].add_recording(a_recording(), 10)
    added = await asyncio.gather(*(store.add_recorded_turns("rec-1", [a_turn()] * 2) for store in replicas * 3))
    assert sorted(turn.number for turns in added for turn in turns) == list(range(1, 13))
    kept = await replicas[1].recorded_turns("rec-1")
    assert [turn.number for turn in kept] == list(range(1, 13))
    assert kept[0].reasoning == b"a\0b"
    found = await replicas[1].recording("ada", "rec-1")
    assert found is not None
    assert (found.turns, found.size_bytes) == (12, 12 * a_turn().size_bytes)
    assert await replicas[0].recorded_bytes("ada") == found.size_bytes
    assert await replicas[0].recorded_bytes("bob") == 0


async def test_a_tenant_has_a_limit_and_reaches_only_its_own(store: Store) -> None:
    for name, tenant, added in (("rec-1", "ada", True), ("rec-2", "ada", False), ("rec-3", "bob", True)):
        assert await store.add_recording(a_recording(name, tenant), 1) is added
    assert await store.recording("bob", "rec-1") is None
    assert await store.delete_recording("bob", "rec-1") is False
    assert [one.recording_id for one in (await store.list_recordings("bob", 10, 0)).rows] == ["rec-3"]


async def test_turns_end_with_their_recording(store: Store) -> None:
    for name in ("rec-1", "rec-2"):
        await store.add_recording(a_recording(name), 10)
        await store.add_recorded_turns(name, [a_turn(name)])
    assert await store.delete_recording("ada", "rec-1")
    assert await numbers(store) == []
    assert await store.add_recorded_turns("rec-1", [a_turn()]) == ()
    assert await store.delete_expired_recordings(NOW) == 0
    assert await store.delete_expired_recordings(NOW + timedelta(hours=1)) == 1
    assert await numbers(store, "rec-2") == []
