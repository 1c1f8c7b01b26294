"""The number of concurrent requests of a tenant; no tenant waits for another one's."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tinsmith_server.services.accounts import concurrency as module
from tinsmith_server.services.accounts.concurrency import SHARED_SECONDS, SLOTS_ALONE, SLOTS_WHILE_SHARED, RequestSlots

WAIT_SECONDS = 20.0


@pytest.fixture
def few_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give one tenant alone as many slots as one among others."""
    for name in ("SLOTS_ALONE", "SLOTS_WHILE_SHARED"):
        monkeypatch.setattr(module, name, 1)


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


class Requests:
    """Requests that run until the test ends them."""

    def __init__(self, slots: RequestSlots) -> None:
        self._at_work = slots
        self._ends: dict[str, asyncio.Event] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.begun: list[str] = []

    def send(self, tenant: str, name: str, *, may_wait: bool = True) -> None:
        self._ends[name] = asyncio.Event()
        self._tasks[name] = asyncio.create_task(self._run(self._at_work.slot(tenant, may_wait=may_wait), name))

    async def _run(self, place: AbstractAsyncContextManager[None], name: str) -> None:
        async with place:
            self.begun.append(name)
            await self._ends[name].wait()

    async def end(self, name: str) -> None:
        self._ends[name].set()
        await asyncio.wait_for(self._tasks[name], WAIT_SECONDS)

    async def give_up(self, name: str) -> None:
        self._tasks[name].cancel()
        await asyncio.wait({self._tasks[name]}, timeout=WAIT_SECONDS)


async def test_a_tenants_requests_beyond_its_places_wait_in_order_and_do_not_delay_other_tenants(
    few_places: None,
) -> None:
    requests = Requests(RequestSlots(longest_seconds=WAIT_SECONDS))
    for name in ("a1", "a2", "a3", "b1"):
        requests.send(name[0], name)
    await settled()
    assert requests.begun == ["a1", "b1"]
    await requests.end("a1")
    await settled()
    assert requests.begun == ["a1", "b1", "a2"]
    for name in ("a2", "a3", "b1"):
        await requests.end(name)
    assert requests.begun == ["a1", "b1", "a2", "a3"]


async def test_a_tenant_alone_has_many_places_and_gives_them_back_when_another_one_comes() -> None:
    now = 0.0
    requests = Requests(RequestSlots(longest_seconds=WAIT_SECONDS, clock=lambda: now))
    names = [f"a{number}" for number in range(2 * SLOTS_ALONE)]
    for name in names:
        requests.send("a", name)
    await settled()
    assert requests.begun == names[:SLOTS_ALONE]
    requests.send("b", "b1")
    await settled()
    assert requests.begun[-1] == "b1"
    for name in names[SLOTS_WHILE_SHARED:SLOTS_ALONE]:
        await requests.end(name)
    await settled()
    assert requests.begun[-1] == "b1", "those that were at work are more than a tenant may have now"
    await requests.end("b1")
    now += SHARED_SECONDS
    await requests.end(names[0])
    await settled()
    assert requests.begun[SLOTS_ALONE + 1 :] == names[SLOTS_ALONE : 2 * SLOTS_ALONE - 1]
    for name in [names[1], *names[SLOTS_ALONE:]]:
        await requests.end(name)


async def test_probes_and_telemetry_take_no_places_from_a_tenant() -> None:
    slots = RequestSlots(longest_seconds=WAIT_SECONDS)
    requests = Requests(slots)
    requests.send("a", "a1")
    await settled()
    async with slots.slot("an address", is_other=False):
        names = [f"a{number}" for number in range(2, SLOTS_ALONE + 1)]
        for name in names:
            requests.send("a", name)
        await settled()
        assert requests.begun == ["a1", *names]
    for name in requests.begun:
        await requests.end(name)


async def test_a_request_that_waits_for_another_resource_frees_its_place(few_places: None) -> None:
    requests = Requests(RequestSlots(longest_seconds=0.01))
    requests.send("a", "a1")
    requests.send("a", "a2")
    async with asyncio.timeout(WAIT_SECONDS):
        while requests.begun != ["a1", "a2"]:
            await asyncio.sleep(0.001)
    await requests.end("a1")
    await requests.end("a2")


async def test_a_poll_has_its_place_for_a_step_and_not_while_it_is_held(few_places: None) -> None:
    slots = RequestSlots(longest_seconds=WAIT_SECONDS)
    requests = Requests(slots)
    names = [f"a{number}" for number in range(20)]
    for name in names:
        requests.send("a", name, may_wait=False)
    assert len(slots) <= 1
    async with asyncio.timeout(WAIT_SECONDS):
        while requests.begun != names:
            begun = len(requests.begun)
            await asyncio.sleep(0)
            assert len(requests.begun) <= begun + 1, "two have begun in one step"
    for name in names:
        await requests.end(name)
    assert len(slots) == 0


@pytest.mark.parametrize("moment", ["while it waits", "as its turn comes"])
async def test_a_cancelled_waiter_leaves_its_place_to_the_next(few_places: None, moment: str) -> None:
    requests = Requests(RequestSlots(longest_seconds=WAIT_SECONDS))
    for name in ("a1", "a2", "a3"):
        requests.send("a", name)
    await settled()
    if moment == "as its turn comes":
        await requests.end("a1")
    await requests.give_up("a2")
    if moment == "while it waits":
        await requests.end("a1")
    await settled()
    assert requests.begun[-1] == "a3"
    await requests.end("a3")
    requests.send("a", "a4")
    await settled()
    assert requests.begun[-1] == "a4"
    await requests.end("a4")


REQUESTS = st.tuples(st.sampled_from("abc"), st.booleans(), st.sampled_from([None, 0.0, 0.001, 0.003]))


@given(st.lists(REQUESTS, min_size=1, max_size=60))
def test_every_request_has_its_turn_and_every_place_comes_back(sent: list[tuple[str, bool, float | None]]) -> None:
    """The promise includes requests that never wait."""
    slots = RequestSlots(longest_seconds=0.002)

    async def request(tenant: str, may_wait: bool, seconds: float | None) -> None:
        async with slots.slot(tenant, may_wait=may_wait):
            if seconds is not None:
                await asyncio.sleep(seconds)

    async def all_of_them() -> None:
        await asyncio.wait_for(asyncio.gather(*(request(*one) for one in sent)), WAIT_SECONDS)
        await asyncio.sleep(0.003)
        assert len(slots) == 0

    asyncio.run(all_of_them())
