"""Many small requests at a time: another tenant's wait for a few of them, however many there are."""

from __future__ import annotations

import asyncio
import statistics
from contextlib import AsyncExitStack

import httpx
import pytest
from support.server.http_server import TestedServer, client_of

MOST_MEANWHILE = 6
"""In the middle. Without places at work it is as many as there are at once. In seconds: `benchmarks/fairness.py`."""
REQUESTS = 30


class Flood:
    """One small request after the other, so many at a time. `answered`: so far."""

    def __init__(self, client: httpx.AsyncClient, session_id: str, at_once: int) -> None:
        self.answered = 0
        self._tasks = [asyncio.create_task(self._ask(client, session_id)) for _ in range(at_once)]

    async def _ask(self, client: httpx.AsyncClient, session_id: str) -> None:
        while True:
            (await client.get(f"/sessions/{session_id}")).raise_for_status()
            self.answered += 1

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@pytest.mark.parametrize(("at_once", "keys"), [(16, 1), (128, 8)])
async def test_another_tenants_requests_wait_for_a_few_of_them(
    installation: TestedServer, at_once: int, keys: int
) -> None:
    """Counted, and in the server's own event loop: seconds are also those of whatever else the machine does."""
    mine = await installation.session()
    async with AsyncExitStack() as stack:
        floods = []
        for number in range(keys):
            made = await installation.services.keys.create("attacker", f"key {number}")
            attacker = await stack.enter_async_context(client_of(httpx.ASGITransport(installation.app), made.secret))
            created = await attacker.post("/create_session", json={"tags": [], "user_metadata": {}, "sdk_version": "0"})
            floods.append(Flood(attacker, str(created.json()["session_id"]), at_once // keys))
        meanwhile = []
        for _ in range(REQUESTS):
            before = answered(floods)
            (await installation.client.get(f"/sessions/{mine}")).raise_for_status()
            meanwhile.append(answered(floods) - before)
        for flood in floods:
            await flood.stop()
    print(f"{at_once} at once: {statistics.median(meanwhile)} answered meanwhile, {max(meanwhile)} at most")
    assert answered(floods) > REQUESTS, "there was no flood"
    assert statistics.median(meanwhile) <= MOST_MEANWHILE


def answered(floods: list[Flood]) -> int:
    return sum(flood.answered for flood in floods)
