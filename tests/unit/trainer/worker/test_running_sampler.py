"""The clients for which a stopping sampler waits."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tinsmith_trainer.worker.startup import RunningSampler


class Unfetched:
    """Unfetched samples, a sampler that can be closed, and their server."""

    def __init__(self) -> None:
        self.did: list[str] = []
        self.sampler = self

    def stop_taking(self) -> None:
        self.did.append("takes no more")

    async def drained(self) -> None:
        await asyncio.Event().wait()

    def close(self) -> None:
        self.did.append("closed")

    async def stop(self, grace_seconds: float) -> None:
        self.did.append("answers no more")


async def test_a_sampler_of_an_ending_server_does_not_wait_for_fetched_results() -> None:
    parts: Any = Unfetched()
    await RunningSampler(parts, parts, drains=False).stop()
    assert parts.did == ["takes no more", "closed", "answers no more"]


async def test_a_shared_sampler_runs_until_its_results_were_fetched() -> None:
    parts: Any = Unfetched()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(RunningSampler(parts, parts, drains=True).stop(), 0.05)
    assert parts.did == ["takes no more"]
