"""One at a time, tenants in turn."""

from __future__ import annotations

import asyncio

from tinsmith_server.services.accounts.concurrency import FairLock


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def run(lock: FairLock, tenant: str, order: list[str], until: asyncio.Event) -> None:
    async with lock.held(tenant):
        order.append(tenant)
        await until.wait()


async def test_tenants_come_in_turn_however_many_one_sends() -> None:
    lock, order, until = FairLock(), list[str](), asyncio.Event()
    tasks = [asyncio.create_task(run(lock, tenant, order, until)) for tenant in "aaaaab"]
    await settled()
    assert order == ["a"]
    until.set()
    await asyncio.gather(*tasks)
    assert order == ["a", "a", "b", "a", "a", "a"]


async def test_a_cancelled_waiter_leaves_its_turn_to_the_next() -> None:
    lock, order, until = FairLock(), list[str](), asyncio.Event()
    tasks = [asyncio.create_task(run(lock, tenant, order, until)) for tenant in "abc"]
    await settled()
    tasks[1].cancel()
    until.set()
    await asyncio.gather(tasks[0], tasks[2])
    assert order == ["a", "c"]


async def test_a_waiter_cancelled_during_the_handover_passes_the_lock_on() -> None:
    lock, order, until = FairLock(), list[str](), asyncio.Event()
    first, second, third = (asyncio.create_task(run(lock, tenant, order, until)) for tenant in "abc")
    await settled()
    until.set()
    await first
    second.cancel()
    await asyncio.wait_for(third, 5)
    await run(lock, "d", order, until)
    assert order[-2:] == ["c", "d"]
