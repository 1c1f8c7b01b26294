"""The replica that gets requests when the fleet or the store does not answer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from tinsmith_server.services.background import inspection
from tinsmith_server.services.background.inspection import Readiness
from tinsmith_server.store.connection import StoreUnavailable

LOST = "the sessions cannot be read"


class Rows:
    """The rows that replicas share."""

    def __init__(self, *announced_replicas: str) -> None:
        self.there = list(announced_replicas)
        self.down = False

    async def check(self) -> None:
        if self.down:
            raise StoreUnavailable("the database does not answer")

    async def announced_replicas(self) -> Sequence[str]:
        return self.there


class Workers:
    """A fleet that knows where its workers are, or says why not."""

    problem: str | None = None


def readiness_of(rows: Rows, fleet: Workers) -> Readiness:
    return Readiness(rows, fleet, "a")  # type: ignore[arg-type]


async def test_a_replica_without_its_workers_is_not_ready_while_other_replicas_run() -> None:
    fleet = Workers()
    fleet.problem = LOST
    assert await readiness_of(Rows("a", "b"), fleet).problem() == LOST


@pytest.mark.parametrize("announced_replicas", [[], ["a"]])
async def test_at_least_one_replica_always_takes_requests(announced_replicas: list[str]) -> None:
    fleet, rows = Workers(), Rows(*announced_replicas)
    replica = readiness_of(rows, fleet)
    fleet.problem = LOST
    assert await replica.problem() is None
    rows.there = ["b"]
    assert await replica.problem() == LOST


async def test_a_store_that_does_not_answer_in_time_counts_as_unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspection, "STORE_SECONDS", 0.0)
    rows = Rows()

    async def hang() -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(rows, "check", hang)
    assert await readiness_of(rows, Workers()).problem() == "the store has not answered for 0 s"


async def test_a_replica_is_not_ready_while_its_store_is_down() -> None:
    rows = Rows()
    rows.down = True
    assert await readiness_of(rows, Workers()).problem() == "the database does not answer"
