"""Many small requests at a time: another tenant's wait for a few of them, however many there are."""

from __future__ import annotations

import asyncio
import itertools
import statistics
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial

import httpx
import pytest
from support.server.http_server import TestedServer, client_of

MOST_MEANWHILE = 6
"""The median. Without request slots it equals the number of parallel calls."""
REQUESTS = 30


Ask = Callable[[], Awaitable[httpx.Response]]


class Flood:
    """One small request after the other, so many at a time. `answered`: so far."""

    def __init__(self, ask: Ask, run_in_transaction: int, status: int = 200) -> None:
        self.answered = 0
        self._ask = ask
        self._status = status
        self._tasks = [asyncio.create_task(self._run()) for _ in range(run_in_transaction)]

    async def _run(self) -> None:
        while True:
            assert (await self._ask()).status_code == self._status
            self.answered += 1
            # Where there is no socket a request may be answered in one step.
            await asyncio.sleep(0)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@pytest.mark.parametrize(("run_in_transaction", "keys"), [(16, 1), (128, 8)])
async def test_another_tenants_requests_wait_for_a_few_of_them(
    installation: TestedServer, run_in_transaction: int, keys: int
) -> None:
    """Counted, and in the server's own event loop: seconds are also those of whatever else the machine does."""
    mine = await installation.session()
    async with AsyncExitStack() as stack:
        floods = []
        for number in range(keys):
            attacker = await stack.enter_async_context(an_attacker(installation, f"key {number}"))
            created = await attacker.post("/create_session", json={"tags": [], "user_metadata": {}, "sdk_version": "0"})
            ask = partial(attacker.get, f"/sessions/{created.json()['session_id']}")
            floods.append(Flood(ask, run_in_transaction // keys))
        await few_are_answered_meanwhile(floods, partial(installation.client.get, f"/sessions/{mine}"))


async def test_requests_that_need_no_wait_do_not_delay_other_tenants(installation: TestedServer) -> None:
    """Each would be done in one step, so that all that are there would come between two steps of another one's."""
    mine = await installation.model()
    about_mine = partial(installation.client.post, "/get_info", json={"model_id": mine})
    async with an_attacker(installation, "a key") as attacker:
        other_model = await replace(installation, client=attacker).model()
        about_other_model = partial(attacker.post, "/get_info", json={"model_id": other_model})
        await few_are_answered_meanwhile([Flood(about_other_model, 128)], about_mine)
        keys = (f"tml-{number}" for number in itertools.count())
        unknown = lambda: attacker.post("/get_info", headers={"X-API-Key": next(keys)})  # noqa: E731
        await few_are_answered_meanwhile([Flood(unknown, 128, 401)], about_mine)


@asynccontextmanager
async def an_attacker(server: TestedServer, name: str) -> AsyncIterator[httpx.AsyncClient]:
    """Return the same attacker each time, with another key."""
    made = await server.services.keys.create("attacker", name)
    async with client_of(httpx.ASGITransport(server.app), made.secret) as client:
        yield client


async def few_are_answered_meanwhile(floods: list[Flood], ask: Ask) -> None:
    meanwhile = []
    for _ in range(REQUESTS):
        before = answered(floods)
        (await ask()).raise_for_status()
        # Its next one comes with all of theirs that have come by then.
        await asyncio.sleep(0)
        meanwhile.append(answered(floods) - before)
    for flood in floods:
        await flood.stop()
    print(f"{statistics.median(meanwhile)} answered meanwhile, {max(meanwhile)} at most")
    assert answered(floods) > REQUESTS / 2, "there was no flood"
    assert statistics.median(meanwhile) <= MOST_MEANWHILE


def answered(floods: list[Flood]) -> int:
    return sum(flood.answered for flood in floods)
