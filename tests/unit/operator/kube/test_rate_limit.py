from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st
from support.simulated_time import now, simulated_time
from tinsmith_operator.kube.rate_limit import MOST_OVERTAKEN, Priority, RateLimit, RequestQueue

URGENT = [priority for priority in Priority if priority is not Priority.PROGRESS]
ARRIVALS = st.lists(st.one_of(st.none(), st.sampled_from(URGENT)), max_size=60)
"""Each item is a waiter that joins, or None for a turn that is given."""


async def send(
    limit: RateLimit, name: str, sent: list[tuple[int, str]], priority: Priority = Priority.ORDINARY
) -> None:
    await limit.wait(priority)
    sent.append((round(now() * 1000), name))


@simulated_time
async def test_a_burst_goes_at_once_and_the_rest_at_the_rate() -> None:
    limit, sent = RateLimit(per_second=10, burst=3), []  # type: ignore[var-annotated]
    await asyncio.gather(*(send(limit, str(number), sent) for number in range(5)))
    assert sent == [(0, "0"), (0, "1"), (0, "2"), (100, "3"), (200, "4")]


@simulated_time
async def test_status_and_deletes_run_before_waiting_work() -> None:
    limit, sent = RateLimit(per_second=1, burst=1), []  # type: ignore[var-annotated]
    await limit.wait()
    await asyncio.gather(
        send(limit, "create", sent),
        send(limit, "apply", sent),
        send(limit, "delete", sent, Priority.DELETE),
        send(limit, "status", sent, Priority.STATUS),
    )
    assert [name for _, name in sent] == ["status", "delete", "create", "apply"]


@simulated_time
async def test_nothing_is_sent_while_the_api_server_asked_for_a_pause() -> None:
    limit, sent = RateLimit(per_second=10, burst=5), []  # type: ignore[var-annotated]
    limit.hold(7)
    limit.hold(3)
    await send(limit, "late", sent)
    assert sent == [(7000, "late")]


@given(ARRIVALS)
def test_no_request_waits_longer_than_for_those_before_it_and_a_few_that_overtake_it(
    arrivals: list[Priority | None],
) -> None:
    line: RequestQueue[object] = RequestQueue()
    turns_left: dict[object, int] = {}
    for priority in [*arrivals, *[None] * len(arrivals)]:
        if priority is not None:
            waiter = object()
            turns_left[waiter] = len(turns_left) + MOST_OVERTAKEN
            line.join(waiter, priority)
        elif len(line):
            del turns_left[line.next()]
            turns_left = {waiter: turns - 1 for waiter, turns in turns_left.items()}
            assert min(turns_left.values(), default=0) >= 0
    assert turns_left == {}


@given(st.lists(st.one_of(st.none(), st.sampled_from(Priority)), max_size=60))
def test_progress_changes_the_turn_of_no_other_request(arrivals: list[Priority | None]) -> None:
    """A turn in which only progress waits is a turn that no other request needs."""
    alone: RequestQueue[int] = RequestQueue()
    together: RequestQueue[int] = RequestQueue()
    for number, priority in enumerate(arrivals):
        if priority is None:
            turn = together.next() if len(together) else None
            is_progress = turn is not None and arrivals[turn] is Priority.PROGRESS
            assert (alone.next() if len(alone) else None) == (None if is_progress else turn)
        else:
            together.join(number, priority)
            if priority is not Priority.PROGRESS:
                alone.join(number, priority)


@simulated_time
async def test_progress_leaves_a_token_for_the_next_request() -> None:
    limit, sent = RateLimit(per_second=1, burst=2), []  # type: ignore[var-annotated]
    await send(limit, "read", sent)
    progress = asyncio.create_task(send(limit, "progress", sent, Priority.PROGRESS))
    await asyncio.sleep(0.5)
    await send(limit, "create", sent)
    await progress
    assert sent == [(0, "read"), (500, "create"), (2000, "progress")]


@simulated_time
async def test_progress_is_sent_where_no_burst_is_allowed() -> None:
    limit, sent = RateLimit(per_second=1, burst=1), []  # type: ignore[var-annotated]
    await limit.wait()
    await send(limit, "progress", sent, Priority.PROGRESS)
    assert sent == [(1000, "progress")]
