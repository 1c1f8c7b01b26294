"""A refresh that many want at once is made once, and is never one that began before they could need it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from tinsmith_server.fleet.kubernetes import watching
from tinsmith_server.fleet.kubernetes.api import ApiUnavailable
from tinsmith_server.fleet.kubernetes.watching import SharedRefresh

SOON_SECONDS = 20.0


class Refreshes:
    """A source that counts its refreshes. Each lasts until it is released, and brings news or not."""

    def __init__(self, *, news: bool = True) -> None:
        self.count = 0
        self.news = news
        self.let_go = asyncio.Event()
        self.trouble: Exception | None = None

    async def __call__(self) -> bool:
        self.count += 1
        await self.let_go.wait()
        if self.trouble is not None:
            raise self.trouble
        return self.news


async def test_concurrent_callers_share_a_refresh_and_its_failure() -> None:
    refreshes = Refreshes()
    shared = SharedRefresh(refreshes, age_seconds=60, timeout_seconds=SOON_SECONDS)
    refreshes.trouble = ApiUnavailable("down")
    refreshes.let_go.set()
    outcomes = await asyncio.gather(*(shared.recent() for _ in range(5)), return_exceptions=True)
    assert outcomes == [refreshes.trouble] * 5
    with pytest.raises(ApiUnavailable):
        await shared.recent()
    assert refreshes.count == 1


async def test_a_refresh_that_began_too_early_is_awaited_and_followed_by_another() -> None:
    """Its answer may be older than the question."""
    refreshes = Refreshes()
    shared = SharedRefresh(refreshes, age_seconds=0.01, timeout_seconds=SOON_SECONDS)
    early = asyncio.create_task(shared.recent())
    await asyncio.sleep(0.05)
    late = asyncio.create_task(shared.recent())
    await asyncio.sleep(0.01)
    assert refreshes.count == 1
    refreshes.let_go.set()
    await asyncio.gather(early, late)
    assert refreshes.count == 2


async def test_a_cancelled_caller_does_not_cancel_the_refresh_of_the_others() -> None:
    refreshes = Refreshes()
    shared = SharedRefresh(refreshes, age_seconds=60, timeout_seconds=SOON_SECONDS)
    impatient, patient = (asyncio.create_task(shared.recent()) for _ in range(2))
    await asyncio.sleep(0.01)
    impatient.cancel()
    await asyncio.sleep(0.01)
    refreshes.let_go.set()
    await patient
    assert (impatient.cancelled(), refreshes.count) == (True, 1)


async def test_a_server_that_stops_begins_no_new_refresh() -> None:
    refreshes = Refreshes()
    shared = SharedRefresh(refreshes, age_seconds=0, timeout_seconds=SOON_SECONDS)
    await shared.close()
    with pytest.raises(ApiUnavailable, match="stopping"):
        await shared.recent()
    assert refreshes.count == 0


async def test_each_refresh_without_news_doubles_the_next_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that makes up ids of samplers causes a few lists of the fleet a minute, however often it asks."""
    pauses: list[float] = []
    time = Simulated(pauses)
    monkeypatch.setattr(watching, "asyncio", time)
    refreshes = Refreshes(news=False)
    refreshes.let_go.set()
    shared = SharedRefresh(refreshes, age_seconds=2, timeout_seconds=SOON_SECONDS)
    for _ in range(6):
        await shared.recent()
        time.now += 2.001
    assert [round(pause) for pause in pauses] == [2, 6, 13, 13, 13]
    refreshes.news = True
    time.now += watching.MOST_PAUSE_SECONDS
    await shared.recent()
    pauses.clear()
    time.now += 2.001
    await shared.recent()
    assert (pauses, refreshes.count) == ([], 8)


class Simulated:
    """asyncio, whose loop's clock a test moves, and whose sleeps move it at once."""

    def __init__(self, pauses: list[float]) -> None:
        self.now = 1000.0
        self._pauses = pauses

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    def get_running_loop(self) -> Any:
        return SimpleNamespace(time=lambda: self.now)

    async def sleep(self, seconds: float) -> None:
        self._pauses.append(seconds)
        self.now += seconds
