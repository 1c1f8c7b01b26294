"""Long polls are held and released together, and share one call for the same thing."""

from __future__ import annotations

import asyncio

import pytest
from tinsmith_server.services.polling.long_polls import LongPolls, SharedCalls


async def forever() -> str:
    await asyncio.Event().wait()
    return "never"


async def test_release_ends_all_held_polls_and_later_polls_are_not_held() -> None:
    polls = LongPolls(hold_seconds=0)
    held = [asyncio.create_task(polls.hold(forever(), released="released")) for _ in range(3)]
    await asyncio.sleep(0)
    assert len(polls) == 3
    polls.release()
    assert await asyncio.gather(*held) == ["released"] * 3
    assert await polls.hold(forever(), released="released") == "released"


async def test_a_client_that_hangs_up_ends_the_work() -> None:
    polls = LongPolls(hold_seconds=0)
    poll = asyncio.create_task(polls.hold(forever(), released="released"))
    await asyncio.sleep(0)
    poll.cancel()
    with pytest.raises(asyncio.CancelledError):
        await poll
    assert len(polls) == 0


class Calls:
    """The calls of a worker; each ends when a test says so."""

    def __init__(self) -> None:
        self.shared: SharedCalls[str, str] = SharedCalls()
        self.started = 0
        self.ended = 0
        self.answer = asyncio.Event()

    async def call(self) -> str:
        self.started += 1
        try:
            await self.answer.wait()
        finally:
            self.ended += 1
        return f"answer {self.started}"

    async def asking(self, count: int, key: str = "a") -> list[asyncio.Task[str]]:
        asked = [asyncio.create_task(self.shared.result(key, self.call)) for _ in range(count)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return asked


async def test_many_equal_requests_make_one_call_and_the_next_request_another() -> None:
    calls = Calls()
    asked = await calls.asking(5)
    calls.answer.set()
    assert await asyncio.gather(*asked) == ["answer 1"] * 5
    assert await calls.shared.result("a", calls.call) == "answer 2"


async def test_a_shared_call_continues_until_its_last_waiter_leaves() -> None:
    calls = Calls()
    first, last = await calls.asking(2)
    first.cancel()
    await asyncio.wait([first])
    assert calls.ended == 0
    last.cancel()
    await asyncio.wait([last])
    [newcomer] = await calls.asking(1)
    assert (calls.started, calls.ended) == (2, 1)
    calls.answer.set()
    assert await newcomer == "answer 2"


async def test_all_callers_get_the_error_of_a_shared_call() -> None:
    async def broken() -> str:
        raise ValueError("the worker is away")

    shared: SharedCalls[str, str] = SharedCalls()
    outcomes = await asyncio.gather(*(shared.result("a", broken) for _ in range(3)), return_exceptions=True)
    assert [type(one) for one in outcomes] == [ValueError] * 3
