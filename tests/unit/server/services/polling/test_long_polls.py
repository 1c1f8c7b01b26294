"""Long polls are held together and let go together."""

from __future__ import annotations

import asyncio

import pytest
from tinsmith_server.services.polling.long_polls import LongPolls


async def forever() -> str:
    await asyncio.Event().wait()
    return "never"


async def test_a_result_is_passed_on() -> None:
    polls = LongPolls()
    assert await polls.hold(asyncio.sleep(0, "done"), released="released") == "done"
    assert len(polls) == 0


async def test_release_lets_all_go_at_once_and_holds_nobody_after() -> None:
    polls = LongPolls()
    held = [asyncio.create_task(polls.hold(forever(), released="released")) for _ in range(3)]
    await asyncio.sleep(0)
    assert len(polls) == 3
    polls.release()
    assert await asyncio.gather(*held) == ["released"] * 3
    assert await polls.hold(forever(), released="released") == "released"


async def test_a_client_that_hangs_up_ends_the_work() -> None:
    polls = LongPolls()
    poll = asyncio.create_task(polls.hold(forever(), released="released"))
    await asyncio.sleep(0)
    poll.cancel()
    with pytest.raises(asyncio.CancelledError):
        await poll
    assert len(polls) == 0


async def test_an_error_reaches_the_poll() -> None:
    async def fails() -> str:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await LongPolls().hold(fails(), released="released")
