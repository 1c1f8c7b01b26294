"""The clients for which a stopping sampler waits."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tinsmith_trainer.sampling.base import SamplerStats
from tinsmith_trainer.worker import startup
from tinsmith_trainer.worker.startup import RunningSampler


class Unfetched:
    """Unfetched samples, a sampler that can be closed, and their server."""

    def __init__(self) -> None:
        self.did: list[str] = []
        self.sampler = self
        self.step_seconds = 0.0

    def stats(self) -> SamplerStats:
        return SamplerStats(0, 0, 0, 0, 0, 0.0, self.step_seconds)

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


async def test_a_sampler_with_a_step_that_does_not_end_ends_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU may hang in a kernel. Then the thread of the sampler never returns, and every sample waits."""
    ended = asyncio.Event()
    monkeypatch.setattr(startup, "end_without_blame", ended.set)
    monkeypatch.setattr(startup, "STEP_CHECK_SECONDS", 0.01)
    parts: Any = Unfetched()
    running = RunningSampler(parts, parts, drains=False, hang_seconds=600.0)
    parts.step_seconds = 599.0
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(ended.wait(), 0.05)
    parts.step_seconds = 600.0
    await asyncio.wait_for(ended.wait(), 60)
    await running.stop()


async def test_a_shared_sampler_runs_until_its_results_were_fetched() -> None:
    parts: Any = Unfetched()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(RunningSampler(parts, parts, drains=True).stop(), 0.05)
    assert parts.did == ["takes no more"]
