"""Texts are made into tokens one at a time, and a tenant's flood keeps another waiting for one of them."""

from __future__ import annotations

import asyncio
import threading

import pytest
from tinsmith_trainer.worker.rendering_queue import RenderingQueue


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


class Rendering:
    """Texts that take as long as a test likes; says which began."""

    def __init__(self) -> None:
        self.turns = RenderingQueue()
        self.begun: list[str] = []
        self.may_end = threading.Semaphore(0)
        self.under_way = 0

    def ask(self, tenant: str, nbytes: int = 4000) -> asyncio.Task[str]:
        return asyncio.create_task(self.turns.run(tenant, nbytes, lambda: self._render(tenant)))

    def _render(self, tenant: str) -> str:
        self.under_way += 1
        assert self.under_way == 1, "two at a time"
        self.begun.append(tenant)
        assert self.may_end.acquire(timeout=60)
        self.under_way -= 1
        return tenant


async def test_a_newcomer_waits_for_the_text_that_is_under_way_and_not_for_a_flood() -> None:
    rendering = Rendering()
    flood = [rendering.ask("greedy") for _ in range(5)]
    await settled()
    newcomer = rendering.ask("modest")
    await settled()
    rendering.may_end.release(2)
    assert await newcomer == "modest"
    assert rendering.begun[:2] == ["greedy", "modest"]
    rendering.may_end.release(4)
    assert await asyncio.gather(*flood) == ["greedy"] * 5


async def test_a_cancelled_request_in_the_queue_is_skipped() -> None:
    rendering = Rendering()
    tasks = [rendering.ask(tenant) for tenant in ("first", "second", "third")]
    await settled()
    tasks[1].cancel()
    rendering.may_end.release(2)
    assert await tasks[0] == "first"
    assert await tasks[2] == "third"
    assert rendering.begun == ["first", "third"]


async def test_a_request_cancelled_while_it_runs_keeps_its_turn_until_its_thread_has_ended() -> None:
    """Otherwise a client that repeatedly cancels would occupy any number of threads."""
    rendering = Rendering()
    gone = rendering.ask("gone")
    while not rendering.begun:
        await asyncio.sleep(0.001)
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    other = rendering.ask("other")
    await settled()
    assert rendering.begun == ["gone"]
    rendering.may_end.release(2)
    assert await other == "other"


async def test_a_text_that_cannot_be_rendered_gives_its_turn_back() -> None:
    queue = RenderingQueue()

    def refuse() -> str:
        raise ValueError("no text")

    with pytest.raises(ValueError, match="no text"):
        await queue.run("a", 1, refuse)
    assert await queue.run("a", 1, lambda: "a text") == "a text"
