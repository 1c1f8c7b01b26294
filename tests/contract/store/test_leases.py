"""Replicas share the work by rows. Time is the database's: a lease of 0 seconds is over when it is taken."""

import asyncio
from datetime import timedelta

import pytest
from support.server.store_records import NOW, later
from tinsmith_server.store.store import Store

pytestmark = pytest.mark.core

ABSENCE = timedelta(seconds=45)


async def test_replicas_know_of_each_other_until_their_time_is_over(replicas: tuple[Store, Store]) -> None:
    first, second = replicas
    assert await first.announce_replica("a", 30) == ["a"]
    assert await second.announce_replica("b", 30) == ["a", "b"]
    await first.announce_replica("a", 0)
    assert await second.announce_replica("b", 30) == ["b"]
    assert await first.announce_replica("a", 30) == ["a", "b"]


async def test_a_replica_can_list_the_announced_replicas_without_an_announcement(replicas: tuple[Store, Store]) -> None:
    first, second = replicas
    assert await second.announced_replicas() == []
    await first.announce_replica("b", 30)
    await first.announce_replica("a", 30)
    assert await second.announced_replicas() == ["a", "b"]
    await first.announce_replica("a", 0)
    assert await second.announced_replicas() == ["b"]
    await first.leave("b")
    assert await second.announced_replicas() == []


async def test_a_held_lease_is_refused_to_others_and_renewed_for_its_owner(replicas: tuple[Store, Store]) -> None:
    first, second = replicas
    assert await first.hold_leases("a", {"reaper", "sweeper"}, 30) == {"reaper", "sweeper"}
    assert await second.hold_leases("b", {"reaper", "binder"}, 30) == {"binder"}
    assert await first.hold_leases("a", {"reaper", "sweeper", "binder"}, 30) == {"reaper", "sweeper"}


async def test_an_expired_lease_moves_and_does_not_come_back(store: Store) -> None:
    await store.hold_leases("a", {"reaper"}, 0)
    assert await store.hold_leases("b", {"reaper"}, 30) == {"reaper"}
    assert await store.hold_leases("a", {"reaper"}, 30) == frozenset()


async def test_only_one_of_concurrent_takers_gets_an_expired_lease(replicas: tuple[Store, Store]) -> None:
    """The takers name the leases in any order, without a deadlock."""
    names = [f"events of {number}" for number in range(40)]
    await replicas[0].hold_leases("gone", names, 0)
    takers = [
        replicas[number % 2].hold_leases(f"replica-{number}", names[number:] + names[:number], 30)
        for number in range(12)
    ]
    held = await asyncio.gather(*takers)
    assert sorted(name for one in held for name in one) == sorted(names)


async def test_renewing_and_giving_up_at_once_ends(replicas: tuple[Store, Store]) -> None:
    names = [f"events of {number}" for number in range(40)]
    for _ in range(5):
        await replicas[0].hold_leases("a", names, 0)
        await asyncio.gather(
            replicas[0].give_up_leases("a", names[::-1]),
            replicas[1].hold_leases("b", names, 0),
            replicas[0].hold_leases("c", names[20:], 0),
        )


async def test_rounds_of_any_replica_without_a_gap_go_back_to_the_first(replicas: tuple[Store, Store]) -> None:
    for number, seconds in enumerate((0, 30, 74, 119)):
        assert await replicas[number % 2].record_round("reaper", later(seconds), ABSENCE) == NOW


async def test_a_replica_with_a_late_clock_makes_no_gap(store: Store) -> None:
    await store.record_round("reaper", NOW, ABSENCE)
    for seconds in (40, -600, 80):
        assert await store.record_round("reaper", later(seconds), ABSENCE) == NOW
