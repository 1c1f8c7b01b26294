"""Requests that must not overlap."""

from __future__ import annotations

import asyncio
import random

import pytest
from tinsmith_trainer.sampling.token_server.vllm import ConflictGate

FOES = {"a": "b", "c": "d"}
ENEMIES = [{"a", "b"}, {"c", "d"}]


class Watch:
    """A watch that holds each turn until the test releases it, and records which turns overlapped."""

    def __init__(self) -> None:
        self.gate = ConflictGate(FOES)
        self.inside: list[str] = []
        self.order: list[str] = []

    async def take(self, traits: str, done: asyncio.Event) -> None:
        async with self.gate.passing(traits):
            self.inside.append(traits)
            self.order.append(traits)
            met = set("".join(self.inside))
            try:
                assert not any(enemies <= met for enemies in ENEMIES), self.inside
                await done.wait()
            finally:
                self.inside.remove(traits)

    def start(self, traits: str) -> tuple[asyncio.Task[None], asyncio.Event]:
        done = asyncio.Event()
        return asyncio.create_task(self.take(traits, done)), done


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_compatible_requests_run_together_and_a_conflicting_one_waits_for_all() -> None:
    watch = Watch()
    started = [watch.start(traits) for traits in ("a", "ac", "b", "b")]
    await settle()
    assert watch.inside == ["a", "ac"]
    started[0][1].set()
    await settle()
    assert watch.inside == ["ac"]
    started[1][1].set()
    await settle()
    assert watch.inside == ["b", "b"]
    for _, done in started:
        done.set()
    await asyncio.gather(*(task for task, _ in started))


@pytest.mark.parametrize("seed", range(20))
async def test_conflicting_turns_never_overlap_and_all_get_in_when_some_give_up(seed: int) -> None:
    draw, watch = random.Random(seed), Watch()
    going: list[tuple[asyncio.Task[None], asyncio.Event]] = []
    for _ in range(200):
        if going and draw.random() < 0.5:
            task, done = going.pop(draw.randrange(len(going)))
            if draw.random() < 0.3:
                task.cancel()
            done.set()
        else:
            going.append(watch.start(draw.choice(["a", "b", "c", "d", "ac", "ad", "bd", ""])))
        if draw.random() < 0.5:
            await asyncio.sleep(0)
    for _, done in going:
        done.set()
    async with asyncio.timeout(10):
        await asyncio.gather(*(task for task, _ in going))
