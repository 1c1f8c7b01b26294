"""A sampler that is told to go stays for what it took, and not a second for what nobody comes for."""

from __future__ import annotations

import asyncio
import math

from hypothesis import given
from hypothesis import strategies as st
from support.simulated_time import now, simulated_time
from tinsmith_trainer.hand_over import UNFETCHED_SECONDS, HandOver


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


async def finish_at(hand_over: HandOver, request_id: str, at: float) -> None:
    await asyncio.sleep(at - now())
    hand_over.finished(request_id)


async def fetch_at(hand_over: HandOver, request_id: str, at: float) -> None:
    await asyncio.sleep(at - now())
    hand_over.settled(request_id)


async def gone_at(hand_over: HandOver, *events: object) -> float:
    """When it went; `events` happen meanwhile."""
    await asyncio.gather(hand_over.complete(), *events)  # type: ignore[call-overload]
    return now()


@simulated_time
async def test_who_has_nothing_goes_at_once() -> None:
    assert await gone_at(HandOver()) == 0


@simulated_time
async def test_it_goes_when_the_last_result_was_fetched() -> None:
    hand_over = HandOver()
    for request_id in ("a", "b"):
        hand_over.took(request_id)
    events = (
        finish_at(hand_over, "a", 3),
        fetch_at(hand_over, "a", 4),
        finish_at(hand_over, "b", 500),
        fetch_at(hand_over, "b", 507),
    )
    assert await gone_at(hand_over, *events) == 507


@simulated_time
async def test_what_nobody_fetches_keeps_it_for_a_minute_after_the_last_finish() -> None:
    hand_over = HandOver()
    for request_id in ("a", "b"):
        hand_over.took(request_id)
    hand_over.finished("a")
    left = asyncio.create_task(hand_over.complete())
    await finish_at(hand_over, "b", 40)
    await fetch_at(hand_over, "b", 41)
    await left
    assert now() == 40 + UNFETCHED_SECONDS


@simulated_time
async def test_results_that_nobody_came_for_before_do_not_keep_it() -> None:
    hand_over = HandOver()
    hand_over.took("long ago")
    hand_over.finished("long ago")
    await asyncio.sleep(UNFETCHED_SECONDS)
    assert hand_over.remaining_seconds() == 0
    await hand_over.complete()
    assert now() == UNFETCHED_SECONDS


@simulated_time
async def test_a_sample_that_was_lost_keeps_nobody() -> None:
    hand_over = HandOver()
    hand_over.took("a")
    hand_over.lost("a")
    await hand_over.complete()
    assert now() == 0


STEPS = st.lists(
    st.tuples(st.sampled_from(["took", "finished", "settled", "lost", "waits"]), st.integers(0, 3)), max_size=30
)


@given(STEPS)
def test_it_stays_exactly_while_a_sample_runs_or_a_fresh_result_waits(steps: list[tuple[str, int]]) -> None:
    async def follow() -> None:
        clock = Clock()
        hand_over = HandOver(clock)
        running: set[int] = set()
        waiting: set[int] = set()
        last_finish = -math.inf
        for step, sample in steps:
            match step:
                case "took" if sample not in running | waiting:
                    running.add(sample)
                    hand_over.took(str(sample))
                case "finished" if sample in running:
                    running.remove(sample)
                    waiting.add(sample)
                    last_finish = clock.now
                    hand_over.finished(str(sample))
                case "settled" if sample in waiting:
                    waiting.remove(sample)
                    hand_over.settled(str(sample))
                case "lost" if sample in running:
                    running.remove(sample)
                    hand_over.lost(str(sample))
                case "waits":
                    clock.now += 25
            stays = bool(running) or (bool(waiting) and clock.now < last_finish + UNFETCHED_SECONDS)
            assert (hand_over.remaining_seconds() > 0) == stays

    asyncio.run(follow())
