from __future__ import annotations

import asyncio
import copy
from typing import Any

import pytest
from support.simulated_time import now, simulated_time
from tinsmith_operator.errors import AlreadyExists, Conflict, NotFound, NotLeading, Unavailable
from tinsmith_operator.runtime.leader import Leader

LEASE_SECONDS = 15


class LeaseServer:
    """One Lease, as the API server keeps it."""

    def __init__(self) -> None:
        self.lease: dict[str, Any] | None = None
        self.writes = 0
        self.down_for: set[str] = set()
        self.loses_answers_to: set[str] = set()
        self.delay_seconds = 0.0

    def ends_for(self, identity: str) -> tuple[Any, Any]:
        async def read() -> dict[str, Any]:
            self._reach(identity)
            if self.lease is None:
                raise NotFound("no lease")
            return copy.deepcopy(self.lease)

        async def write(lease: dict[str, Any], _timeout_seconds: float) -> dict[str, Any]:
            self._reach(identity)
            await asyncio.sleep(self.delay_seconds)
            version = lease["metadata"].get("resourceVersion")
            if version is None and self.lease is not None:
                raise AlreadyExists("another candidate was faster")
            if self.lease is not None and version != self.lease["metadata"]["resourceVersion"]:
                raise Conflict("another candidate was faster")
            self.writes += 1
            metadata = {**lease["metadata"], "uid": "lease", "resourceVersion": str(self.writes)}
            self.lease = copy.deepcopy({**lease, "metadata": metadata})
            if identity in self.loses_answers_to:
                raise Unavailable("the answer was lost")
            return copy.deepcopy(self.lease)

        return read, write

    def _reach(self, identity: str) -> None:
        if identity in self.down_for:
            raise Unavailable("no way to the API server")


class Candidate:
    def __init__(self, server: LeaseServer, identity: str, renew_seconds: float | None = None) -> None:
        self.changes: list[tuple[float, bool]] = []
        read, write = server.ends_for(identity)
        self.leader = Leader(
            read,
            write,
            namespace="tin",
            name="tinsmith-operator",
            identity=identity,
            lease_seconds=LEASE_SECONDS,
            renew_seconds=renew_seconds,
            changed=lambda leads: self.changes.append((now(), leads)),
        )
        self.task = asyncio.create_task(self.leader.run())

    async def die(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


@simulated_time
async def test_the_first_one_leads_at_once_and_keeps_leading() -> None:
    first = Candidate(LeaseServer(), "first")
    await asyncio.sleep(0.1)
    assert first.leader.is_leading
    await asyncio.sleep(3600)
    assert first.changes == [(0, True)]


@simulated_time
async def test_no_two_candidates_ever_have_permission_under_any_failures() -> None:
    server = LeaseServer()
    candidates = [Candidate(server, name) for name in ("a", "b", "c")]
    for step in range(4000):
        server.down_for = {name for number, name in enumerate("abc") if (step // (37 + 11 * number)) % 3 == 0}
        server.loses_answers_to = {name for number, name in enumerate("abc") if (step // (13 + 7 * number)) % 4 == 0}
        server.delay_seconds = (step // 29) % 5
        await asyncio.sleep(0.5)
        assert sum(candidate.leader.is_leading for candidate in candidates) <= 1
    assert all(candidate.changes for candidate in candidates), "each of them should have led once"


@simulated_time
async def test_a_write_may_last_until_the_lease_ends_and_no_longer() -> None:
    server = LeaseServer()
    first = Candidate(server, "first")
    await asyncio.sleep(0.1)
    server.down_for = {"first"}
    await asyncio.sleep(LEASE_SECONDS * 2 / 3 - 0.2)
    assert first.leader.permit() == pytest.approx(LEASE_SECONDS / 3 + 0.1)
    await asyncio.sleep(0.2)
    with pytest.raises(NotLeading):
        first.leader.permit()


@simulated_time
async def test_a_lease_that_was_deleted_is_created_again() -> None:
    server = LeaseServer()
    first = Candidate(server, "first")
    await asyncio.sleep(10)
    server.lease = None
    await asyncio.sleep(LEASE_SECONDS)
    assert server.lease is not None
    assert first.leader.is_leading


@simulated_time
async def test_the_lease_shows_the_leader_and_the_number_of_changes() -> None:
    server = LeaseServer()
    first = Candidate(server, "first")
    await asyncio.sleep(1)
    await first.die()
    second = Candidate(server, "second")
    await asyncio.sleep(3 * LEASE_SECONDS)
    assert server.lease is not None
    spec = server.lease["spec"]
    assert (spec["holderIdentity"], spec["leaseTransitions"], spec["leaseDurationSeconds"]) == ("second", 1, 15)
    await second.die()


@simulated_time
async def test_a_lease_without_a_word_in_it_is_free() -> None:
    server = LeaseServer()
    server.lease = {"metadata": {"name": "tinsmith-operator", "uid": "lease", "resourceVersion": "1"}}
    candidate = Candidate(server, "a")
    await asyncio.sleep(1)
    assert candidate.leader.is_leading
    await candidate.die()


@simulated_time
@pytest.mark.parametrize(("renew_seconds", "writes"), [(None, 11), (1.0, 31), (5.0, 7)])
async def test_the_lease_is_renewed_at_the_configured_interval_or_five_times_in_its_duration(
    renew_seconds: float | None, writes: int
) -> None:
    server = LeaseServer()
    one = Candidate(server, "one", renew_seconds)
    await asyncio.sleep(2 * LEASE_SECONDS + 0.5)
    assert server.writes == writes
    await one.die()
