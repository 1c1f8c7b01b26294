from __future__ import annotations

import asyncio
import random

import pytest
from support.simulated_time import now, simulated_time
from tinsmith_operator.runtime.workqueue import (
    FIRST_RETRY_SECONDS,
    JITTER,
    LONGEST_RETRY_SECONDS,
    MOST_OVERTAKEN,
    Precedence,
    WorkQueue,
)


class Worker:
    """A worker that takes keys without end; each takes a while."""

    def __init__(self, queue: WorkQueue[str], seconds: float = 1.0) -> None:
        self.queue = queue
        self.seconds = seconds
        self.began: list[tuple[float, str]] = []
        self.running: set[str] = set()
        self.most_at_once = 0

    async def run(self) -> None:
        while True:
            key = await self.queue.take()
            assert key not in self.running, "a key ran twice at the same time"
            self.running.add(key)
            self.most_at_once = max(self.most_at_once, len(self.running))
            self.began.append((now(), key))
            await asyncio.sleep(self.seconds)
            self.running.discard(key)
            self.queue.done(key)


async def run_for(seconds: float, worker: Worker, workers: int = 1) -> None:
    tasks = [asyncio.create_task(worker.run()) for _ in range(workers)]
    await asyncio.sleep(seconds)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@simulated_time
async def test_keys_run_in_the_order_they_came_and_no_more_at_once_than_there_are_workers() -> None:
    queue: WorkQueue[str] = WorkQueue()
    worker = Worker(queue)
    for key in "abcde":
        queue.add(key)
    await run_for(10, worker, workers=2)
    assert worker.began == [(0, "a"), (0, "b"), (1, "c"), (1, "d"), (2, "e")]
    assert worker.most_at_once == 2


@simulated_time
async def test_a_failing_key_comes_back_later_each_time_up_to_a_limit() -> None:
    queue: WorkQueue[str] = WorkQueue(random.Random(7))
    seconds = []
    for _ in range(20):
        seconds.append(queue.retry("a"))
        await asyncio.sleep(seconds[-1])
        queue.done(await queue.take())
    for number, pause in enumerate(seconds):
        exact = min(LONGEST_RETRY_SECONDS, FIRST_RETRY_SECONDS * 2**number)
        assert exact * (1 - JITTER) <= pause <= exact * (1 + JITTER)
    assert len(set(seconds)) == len(seconds), "without jitter, keys that failed together come back together"


@simulated_time
async def test_a_success_makes_the_next_failure_the_first() -> None:
    queue: WorkQueue[str] = WorkQueue()
    for _ in range(8):
        queue.retry("a")
    queue.settle("a")
    assert queue.retry("a") <= FIRST_RETRY_SECONDS * (1 + JITTER)


@simulated_time
async def test_a_retry_waits_at_least_as_long_as_the_api_server_asked() -> None:
    queue: WorkQueue[str] = WorkQueue()
    worker = Worker(queue)
    queue.retry("a", at_least_seconds=17)
    await run_for(100, worker)
    assert worker.began == [(17, "a")]


@simulated_time
async def test_a_held_key_comes_back_at_its_time_despite_other_requests() -> None:
    queue: WorkQueue[str] = WorkQueue(random.Random(7))
    worker = Worker(queue)
    for _ in range(20):
        queue.retry("a")
    queue.add("a")
    seconds = queue.hold("a")
    assert seconds > LONGEST_RETRY_SECONDS * (1 - JITTER)
    assert queue.depth == 0
    queue.add_after("a", 5)
    for at in (1, 10, 100):
        asyncio.get_running_loop().call_later(at, queue.add, "a")
    queue.add("b")
    await run_for(1000, worker)
    assert worker.began == [(0, "b"), (pytest.approx(seconds), "a")]


@simulated_time
async def test_a_key_that_is_released_runs_at_once_and_no_second_time_at_its_time() -> None:
    queue: WorkQueue[str] = WorkQueue()
    worker = Worker(queue)
    for _ in range(20):
        queue.retry("a")
    queue.hold("a")
    asyncio.get_running_loop().call_later(7, queue.release, "a")
    await run_for(1000, worker)
    assert worker.began == [(7, "a")]


@simulated_time
async def test_join_returns_after_the_running_work_is_done() -> None:
    queue: WorkQueue[str] = WorkQueue()
    await queue.join()
    queue.add("a")
    running = asyncio.create_task(Worker(queue, seconds=5).run())
    await asyncio.sleep(1)
    await queue.join()
    assert now() == 5
    running.cancel()


@simulated_time
async def test_the_queue_depth_counts_waiting_and_not_running_work() -> None:
    queue: WorkQueue[str] = WorkQueue()
    for key in "abc":
        queue.add(key)
    assert (queue.depth, queue.running) == (3, 0)
    await queue.take()
    assert (queue.depth, queue.running) == (2, 1)


@simulated_time
@pytest.mark.parametrize("seed", range(20))
async def test_no_key_is_lost_or_run_twice_at_once_in_any_order_of_requests(seed: int) -> None:
    chance = random.Random(seed)
    queue: WorkQueue[str] = WorkQueue(chance)
    worker = Worker(queue, seconds=0.3)
    loop = asyncio.get_running_loop()
    last_asked: dict[str, float] = {}
    for _ in range(200):
        at, key = chance.uniform(0, 20), chance.choice("abcdef")
        loop.call_later(at, queue.add, key)
        last_asked[key] = max(at, last_asked.get(key, 0))
    await run_for(60, worker, workers=3)
    for key, at in last_asked.items():
        assert max(began for began, ran in worker.began if ran == key) >= at


@simulated_time
async def test_what_has_begun_comes_to_its_end_before_more_begins() -> None:
    queue: WorkQueue[str] = WorkQueue()
    for key in "abc":
        queue.add(key, Precedence.NEW)
    order = []
    while queue.depth:
        key = await queue.take()
        order.append(key)
        if order.count(key) < 3:
            queue.add(key)
        queue.done(key)
    assert "".join(order) == "aaabbbccc"


@simulated_time
async def test_a_new_key_is_overtaken_only_so_often() -> None:
    queue: WorkQueue[str] = WorkQueue()
    queue.add("new", Precedence.NEW)
    for number in range(3 * MOST_OVERTAKEN[Precedence.NEW]):
        queue.add(f"busy-{number}")
    order = []
    while queue.depth:
        key = await queue.take()
        order.append(key)
        queue.done(key)
    assert order.index("new") == MOST_OVERTAKEN[Precedence.NEW]


@simulated_time
async def test_a_new_key_that_is_added_again_as_a_begun_one_waits_no_longer_with_the_new_ones() -> None:
    queue: WorkQueue[str] = WorkQueue()
    for key in "ab":
        queue.add(key, Precedence.NEW)
    queue.add("b")
    queue.add("b", Precedence.NEW)
    assert queue.depth == 2
    assert [await queue.take(), await queue.take()] == ["b", "a"]


@simulated_time
async def test_first_statuses_wait_until_others_have_begun_but_only_so_long() -> None:
    queue: WorkQueue[str] = WorkQueue()
    queue.add("status", Precedence.FIRST_STATUS)
    most = MOST_OVERTAKEN[Precedence.FIRST_STATUS]
    for number in range(2 * most):
        queue.add(f"new-{number}", Precedence.NEW)
    order = [await queue.take() for _ in range(most + 1)]
    assert order.index("status") == most


@simulated_time
async def test_new_keys_are_not_delayed_by_first_statuses() -> None:
    queue: WorkQueue[str] = WorkQueue()
    for number in range(3):
        queue.add(f"status-{number}", Precedence.FIRST_STATUS)
    queue.add("new", Precedence.NEW)
    assert await queue.take() == "new"


@simulated_time
async def test_a_first_status_that_is_due_later_waits_behind_others_then() -> None:
    queue: WorkQueue[str] = WorkQueue()
    queue.add_after("status", 2, Precedence.FIRST_STATUS)
    await asyncio.sleep(3)
    queue.add("new", Precedence.NEW)
    assert [await queue.take(), await queue.take()] == ["new", "status"]


@simulated_time
async def test_a_session_that_starts_gets_its_turn_when_its_pod_is_ready() -> None:
    queue: WorkQueue[str] = WorkQueue()
    for key in "abc":
        queue.add(key, Precedence.STARTING)
    queue.add("c", Precedence.FIRST_STATUS)
    assert [await queue.take(), await queue.take()] == ["c", "a"]
