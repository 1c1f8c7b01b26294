from __future__ import annotations

import asyncio

from support.simulated_time import now, simulated_time
from tinsmith_operator.kube.rate_limit import Priority, RateLimit


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
async def test_a_pause_fills_the_bucket_no_higher_than_the_burst() -> None:
    limit, sent = RateLimit(per_second=10, burst=2), []  # type: ignore[var-annotated]
    await limit.wait()
    await asyncio.sleep(1000)
    await asyncio.gather(*(send(limit, str(number), sent) for number in range(3)))
    assert sent == [(1000_000, "0"), (1000_000, "1"), (1000_100, "2")]


@simulated_time
async def test_status_and_deletes_overtake_what_waits() -> None:
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


@simulated_time
async def test_who_gives_up_waiting_takes_no_turn() -> None:
    limit, sent = RateLimit(per_second=1, burst=1), []  # type: ignore[var-annotated]
    await limit.wait()
    impatient = asyncio.create_task(send(limit, "impatient", sent))
    patient = asyncio.create_task(send(limit, "patient", sent))
    await asyncio.sleep(0.5)
    impatient.cancel()
    await patient
    assert sent == [(1000, "patient")]
