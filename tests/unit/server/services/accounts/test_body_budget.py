"""Room for bodies: it is waited for, given back, never exceeded but by the one that came first."""

from __future__ import annotations

import asyncio

import pytest
from starlette.requests import Request
from starlette.types import Message
from tinsmith_server.errors import TooBusy
from tinsmith_server.routes.http.uploads import parts
from tinsmith_server.services.accounts.body_budget import BodyBudget


@pytest.fixture
def budget() -> BodyBudget:
    return BodyBudget(bytes_per_tenant=100, bytes_in_all=150, wait_seconds=0.05)


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_tenants_next_body_waits_for_the_one_before(budget: BodyBudget) -> None:
    with budget.account("a") as first, budget.account("a") as second:
        await first.take(90)
        waiting = asyncio.create_task(second.take(20))
        await settled()
        assert not waiting.done()
        first.give_back(10)
        await waiting
        assert second.held_bytes == 20


async def test_a_request_that_waits_too_long_gets_the_name_of_the_full_budget(budget: BodyBudget) -> None:
    with budget.account("a") as first, budget.account("a") as second, budget.account("b") as other:
        await first.take(100)
        with pytest.raises(TooBusy, match=r"your requests in flight have 100 bytes.*body_bytes_per_tenant"):
            await second.take(1)
        with pytest.raises(TooBusy, match=r"have reached the server's limit of.*body_bytes_in_all"):
            await other.take(51)
    assert budget.held_bytes == 0


async def test_bodies_that_came_half_do_not_wait_for_each_other(budget: BodyBudget) -> None:
    """The one that began first gets what it needs, and the next one after it."""
    with budget.account("a") as first, budget.account("a") as second:
        await first.take(50)
        await second.take(50)
        waiting = asyncio.create_task(second.take(10))
        await first.take(50)
        await settled()
        assert not waiting.done()
        first.received()
        await waiting


async def test_a_received_body_holds_its_budget_until_it_is_processed(budget: BodyBudget) -> None:
    with budget.account("b") as other:
        with budget.account("a") as first:
            await first.take(150)
            first.received()
            other.received()
            waiting = asyncio.create_task(other.take(50))
            await settled()
            assert not waiting.done()
        await waiting


async def test_the_first_of_several_tenants_may_exceed_the_common_budget(budget: BodyBudget) -> None:
    with budget.account("a") as first, budget.account("b") as second:
        await first.take(75)
        await second.take(75)
        with pytest.raises(TooBusy):
            await second.take(1)
        await first.take(25)


async def test_a_slow_upload_does_not_take_the_first_ones_turn(budget: BodyBudget) -> None:
    async def receive() -> Message:
        return {"type": "http.request", "body": b"part", "more_body": True}

    with budget.account("c") as file, budget.account("a") as first, budget.account("b") as second:
        arriving = parts(Request({"type": "http", "headers": []}, receive), 1000, file)
        await anext(arriving)
        await first.take(75)
        await second.take(71)
        await first.take(25)
        await arriving.aclose()
