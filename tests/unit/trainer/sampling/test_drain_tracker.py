"""A draining sampler stays until its samples are fetched, and not a second longer for samples without a client."""

from __future__ import annotations

import asyncio
import math

from hypothesis import given
from hypothesis import strategies as st
from support.simulated_time import now, simulated_time
from tinsmith_trainer.sampling.sample_queue import UNFETCHED_SECONDS, DrainTracker


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


async def finish_at(drain_tracker: DrainTracker, at: float) -> None:
    await asyncio.sleep(at - now())
    drain_tracker.finished()


async def fetch_at(drain_tracker: DrainTracker, at: float) -> None:
    await asyncio.sleep(at - now())
    drain_tracker.settled()


@simulated_time
async def test_unfetched_results_keep_it_for_a_minute_after_the_last_finish() -> None:
    drain_tracker = DrainTracker()
    drain_tracker.took()
    drain_tracker.took()
    drain_tracker.finished()
    left = asyncio.create_task(drain_tracker.complete())
    await finish_at(drain_tracker, 40)
    await fetch_at(drain_tracker, 41)
    await left
    assert now() == 40 + UNFETCHED_SECONDS


STEPS = st.lists(
    st.tuples(st.sampled_from(["took", "finished", "settled", "dropped", "waits"]), st.integers(0, 3)), max_size=30
)


@given(STEPS)
def test_it_stays_exactly_while_a_sample_runs_or_a_fresh_result_waits(steps: list[tuple[str, int]]) -> None:
    async def follow() -> None:
        clock = Clock()
        drain_tracker = DrainTracker(clock)
        running: set[int] = set()
        waiting: set[int] = set()
        last_finish = -math.inf
        for step, sample in steps:
            match step:
                case "took" if sample not in running | waiting:
                    running.add(sample)
                    drain_tracker.took()
                case "finished" if sample in running:
                    running.remove(sample)
                    waiting.add(sample)
                    last_finish = clock.now
                    drain_tracker.finished()
                case "settled" if sample in waiting:
                    waiting.remove(sample)
                    drain_tracker.settled()
                case "dropped" if sample in running:
                    running.remove(sample)
                    drain_tracker.dropped()
                case "waits":
                    clock.now += 25
            stays = bool(running) or (bool(waiting) and clock.now < last_finish + UNFETCHED_SECONDS)
            assert (drain_tracker.remaining_seconds() > 0) == stays

    asyncio.run(follow())


@simulated_time
async def test_a_drain_ends_when_the_last_result_is_fetched() -> None:
    drain_tracker = DrainTracker()
    drain_tracker.took()
    drain_tracker.took()
    left = asyncio.create_task(drain_tracker.complete())
    await finish_at(drain_tracker, 3)
    await fetch_at(drain_tracker, 4)
    await finish_at(drain_tracker, 500)
    await fetch_at(drain_tracker, 507)
    await left
    assert now() == 507


@simulated_time
async def test_a_dropped_sample_does_not_delay_a_drain() -> None:
    drain_tracker = DrainTracker()
    drain_tracker.took()
    left = asyncio.create_task(drain_tracker.complete())
    await asyncio.sleep(5)
    drain_tracker.dropped()
    await left
    assert now() == 5
