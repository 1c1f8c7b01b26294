"""Many who wait for what one worker has reported wait no longer than one of them."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tinsmith_server.errors import WorkerUnavailable
from tinsmith_server.services.checkpoints.worker_events import Events


class OneWorker:
    """Fleet, handle, client and store at once. `answers` lets its events go, `gives_up` ends the waits for it."""

    def __init__(self) -> None:
        self.is_away = False
        self.waiting = 0
        self.calls = 0
        self.gives_up, self.answers = asyncio.Event(), asyncio.Event()

    def worker(self, _worker_id: str) -> OneWorker:
        return self

    async def connection(self, _timeout_seconds: float) -> OneWorker:
        if self.is_away:
            self.waiting += 1
            await self.gives_up.wait()
            raise WorkerUnavailable("it is away")
        return self

    async def get_worker(self, _worker_id: str) -> Any:
        return SimpleNamespace(event_cursor=7)

    async def events(self, _cursor: int, _hold_seconds: float) -> list[Any]:
        self.calls += 1
        await self.answers.wait()
        return []


@pytest.fixture
def worker() -> OneWorker:
    return OneWorker()


@pytest.fixture
def events(worker: OneWorker) -> Events:
    any_of_it = cast("Any", worker)
    return Events(any_of_it, any_of_it, any_of_it, any_of_it, any_of_it, lambda *_: None)


async def turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_waiters_for_an_unreachable_worker_wait_concurrently(events: Events, worker: OneWorker) -> None:
    worker.is_away = True
    drains = [asyncio.create_task(events.drain("w1")) for _ in range(8)]
    await turns()
    assert worker.waiting == 8
    worker.gives_up.set()
    assert {type(error) for error in await asyncio.gather(*drains, return_exceptions=True)} == {WorkerUnavailable}


async def test_requests_during_a_read_of_events_share_the_next_read(events: Events, worker: OneWorker) -> None:
    first = asyncio.create_task(events.drain("w1"))
    await turns()
    others = [asyncio.create_task(events.drain("w1")) for _ in range(8)]
    await turns()
    others[0].cancel()
    worker.answers.set()
    assert await first == 7
    assert await asyncio.gather(*others[1:]) == [7] * 7
    assert worker.calls == 2
