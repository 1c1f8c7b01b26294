"""Shares of the work, over a store that is a dictionary and a clock that only the test moves."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from typing import Any

import pytest
from tinsmith_server.services.background import leases
from tinsmith_server.services.background.leases import LEASE_SECONDS, Leases
from tinsmith_server.store.connection import StoreUnavailable

TASKS = [f"task {number}" for number in range(60)]


class Rows:
    """The rows that two replicas share. While `down`, reads fail."""

    def __init__(self) -> None:
        self.now = 0.0
        self.down = False
        self.there: dict[str, float] = {}
        self.owners: dict[str, tuple[str, float]] = {}

    async def announce_replica(self, replica: str, seconds: float) -> Sequence[str]:
        if self.down:
            raise StoreUnavailable("down")
        self.there[replica] = self.now + seconds
        return sorted(name for name, until in self.there.items() if until > self.now)

    async def hold_leases(self, replica: str, names: Collection[str], seconds: float) -> frozenset[str]:
        free = {name for name in names if self._owner(name) in {None, replica}}
        self.owners |= dict.fromkeys(free, (replica, self.now + seconds))
        return frozenset(free)

    async def give_up_leases(self, replica: str, names: Collection[str]) -> None:
        for name in names:
            self.owners.pop(name, None)

    async def leave(self, replica: str) -> None:
        self.there.pop(replica, None)
        self.owners = {name: held for name, held in self.owners.items() if held[0] != replica}

    def _owner(self, name: str) -> str | None:
        owner, until = self.owners.get(name, ("", 0.0))
        return owner if until > self.now else None


class Workers:
    """A fleet that knows where its workers are, or says why not."""

    problem: str | None = None


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> Rows:
    rows = Rows()
    monkeypatch.setattr(leases.time, "clock_gettime", lambda _clock: rows.now)
    return rows


def replica_of(rows: Any, name: str, fleet: Any = None) -> Leases:
    replica = Leases(rows, fleet or Workers(), name)  # type: ignore[arg-type]
    for task in TASKS:
        replica.want(task)
    return replica


def share(replica: Leases) -> set[str]:
    return {task for task in TASKS if replica.holds(task)}


async def test_a_second_replica_gets_its_share_and_no_task_has_two_owners(rows: Rows) -> None:
    first, second = replica_of(rows, "a"), replica_of(rows, "b")
    for _ in range(3):
        for replica in (first, second):
            await replica.renew()
            assert not share(first) & share(second)
    assert share(first) | share(second) == set(TASKS)
    assert min(len(share(first)), len(share(second))) > len(TASKS) / 4


async def test_tasks_of_a_dead_replica_move_after_its_lease_expires(rows: Rows) -> None:
    first, second = replica_of(rows, "a"), replica_of(rows, "b")
    for replica in (first, second, first):
        await replica.renew()
    rows.now += LEASE_SECONDS - 0.1
    await first.renew()
    assert share(first) != set(TASKS)
    rows.now += 0.1
    await first.renew()
    assert share(first) == set(TASKS)


async def test_a_replica_that_was_paused_finds_its_leases_over(rows: Rows) -> None:
    paused, other = replica_of(rows, "a"), replica_of(rows, "b")
    await paused.renew()
    rows.now += LEASE_SECONDS
    await other.renew()
    assert share(paused) == set()
    await paused.renew()
    assert not share(paused) & share(other)


async def test_a_store_that_is_away_lets_the_leases_run_out(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "RENEW_SECONDS", 0.001)
    replica = replica_of(rows, "a")
    keeping = asyncio.create_task(replica.keep())
    await replica.until_held(TASKS[0])
    rows.down = True
    rows.now += LEASE_SECONDS
    assert share(replica) == set()
    rows.down = False
    await replica.until_held(TASKS[0])
    keeping.cancel()


async def test_a_round_that_fails_is_followed_by_another(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "RENEW_SECONDS", 0.001)
    replica = replica_of(rows, "a")
    failed = asyncio.Event()

    async def fail(_replica: str, _seconds: float) -> Sequence[str]:
        failed.set()
        raise RuntimeError("an unexpected error")

    with monkeypatch.context() as trouble:
        trouble.setattr(rows, "announce_replica", fail)
        keeping = asyncio.create_task(replica.keep())
        await failed.wait()
    await asyncio.wait_for(replica.until_held(TASKS[0]), 10)
    keeping.cancel()


async def test_a_task_that_is_wanted_later_is_held_without_waiting_for_the_next_round(rows: Rows) -> None:
    replica = replica_of(rows, "a")
    keeping = asyncio.create_task(replica.keep())
    await replica.until_held(TASKS[0])
    replica.want("events of a new worker")
    await replica.until_held("events of a new worker")
    keeping.cancel()


async def test_the_lease_keeper_ends_on_request_even_if_a_task_is_due(rows: Rows) -> None:
    replica = replica_of(rows, "a")
    keeping = asyncio.create_task(replica.keep())
    await replica.until_held(TASKS[0])
    await asyncio.sleep(0)
    replica.unwant(TASKS[0])
    keeping.cancel()
    ended, _ = await asyncio.wait({keeping}, timeout=1)
    assert ended == {keeping}


async def test_a_replica_that_does_not_know_its_workers_leaves_the_tasks_to_others(rows: Rows) -> None:
    fleet = Workers()
    lost, other = replica_of(rows, "a", fleet), replica_of(rows, "b")
    for replica in (lost, other, lost):
        await replica.renew()
    fleet.problem = "the cluster's API does not answer"
    await lost.renew()
    await other.renew()
    assert (share(lost), share(other)) == (set(), set(TASKS))


@pytest.mark.parametrize("transaction", ["announce_replica", "hold_leases"])
async def test_a_round_that_is_under_way_when_it_stops_is_not_overtaken_by_its_leaving(
    transaction: str, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store completes a transaction even if its caller no longer waits for it."""
    under_way, may_go_on, committed = asyncio.Event(), asyncio.Event(), asyncio.Event()
    commit = getattr(rows, transaction)

    async def to_its_end(*arguments: Any) -> Any:
        under_way.set()
        await may_go_on.wait()
        done = await commit(*arguments)
        committed.set()
        return done

    async def shielded(*arguments: Any) -> Any:
        return await asyncio.shield(asyncio.create_task(to_its_end(*arguments)))

    monkeypatch.setattr(rows, transaction, shielded)
    stopping, other = replica_of(rows, "a"), replica_of(rows, "b")
    keeping = asyncio.create_task(stopping.keep())
    await under_way.wait()
    keeping.cancel()
    asyncio.get_running_loop().call_later(0.05, may_go_on.set)
    await asyncio.gather(keeping, return_exceptions=True)
    await stopping.leave()
    await committed.wait()
    await other.renew()
    assert share(other) == set(TASKS)
