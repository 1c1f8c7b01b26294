"""Draws in flight at a server: never too many, a fair share for each tenant, and none waits indefinitely."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tinsmith_trainer.sampling.token_server.admission import Admission

MOST = 8
WAIT_SECONDS = 20.0


class Server:
    """Draws end when a test says so."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self.inside: list[tuple[str, asyncio.Event]] = []
        self.order: list[str] = []
        self.most_inside = 0

    async def draw(self, tenant: str, tokens: int) -> None:
        async with self._admission.turn(tenant, tokens):
            ends = asyncio.Event()
            self.inside.append((tenant, ends))
            self.order.append(tenant)
            self.most_inside = max(self.most_inside, len(self.inside))
            try:
                await ends.wait()
            finally:
                self.inside.remove((tenant, ends))

    def count(self) -> Counter[str]:
        return Counter(tenant for tenant, _ in self.inside)

    async def end_first(self) -> None:
        self.inside[0][1].set()
        await settle()


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def begin(server: Server, tenant: str, count: int, tokens: int = 100) -> list[asyncio.Task[None]]:
    return [asyncio.create_task(server.draw(tenant, tokens)) for _ in range(count)]


async def finish(server: Server, tasks: list[asyncio.Task[None]]) -> None:
    await settle()
    while not all(task.done() for task in tasks):
        await server.end_first()
    await asyncio.gather(*tasks)


@pytest.fixture
async def server() -> Server:
    return Server(Admission(MOST))


async def test_a_tenant_alone_has_half_and_another_comes_in_at_once(server: Server) -> None:
    tasks = begin(server, "many", 20)
    await settle()
    assert server.count() == {"many": MOST // 2}
    tasks += begin(server, "few", 1)
    await settle()
    assert server.count() == {"many": MOST // 2, "few": 1}
    await finish(server, tasks)


async def test_tenants_that_want_more_come_to_have_the_same(server: Server) -> None:
    tasks = begin(server, "first", 40) + begin(server, "second", 40)
    await settle()
    for _ in range(20):
        await server.end_first()
    assert abs(server.count()["first"] - server.count()["second"]) <= 1
    await finish(server, tasks)


@given(st.lists(st.tuples(st.sampled_from("abcde"), st.integers(1, 10_000), st.booleans()), max_size=60))
def test_all_samples_are_drawn_and_never_too_many_at_once(acts: list[tuple[str, int, bool]]) -> None:
    async def play() -> None:
        server = Server(Admission(MOST))
        tasks: list[asyncio.Task[None]] = []
        for tenant, tokens, ends in acts:
            tasks += begin(server, tenant, 1, tokens)
            await settle()
            if ends and server.inside:
                await server.end_first()
            elif tokens % 7 == 0:
                tasks.pop().cancel()
        async with asyncio.timeout(WAIT_SECONDS):
            await finish(server, tasks)
        assert server.most_inside <= MOST

    asyncio.run(play())
