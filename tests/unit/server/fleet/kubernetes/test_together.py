"""Beginnings that belong together end together."""

from __future__ import annotations

import asyncio

import pytest
from support.simulated_time import now, simulated_time
from tinsmith_server.fleet.kubernetes.watching import together


async def after(seconds: float, result: int) -> int:
    await asyncio.sleep(seconds)
    return result


async def failing() -> int:
    raise ValueError("no")


@simulated_time
async def test_all_results_arrive_in_order_after_the_last_is_ready() -> None:
    assert await together([after(3, 1), after(1, 2)]) == [1, 2]
    assert now() == 3


@simulated_time
async def test_a_failure_is_raised_alone_and_leaves_no_task_running() -> None:
    with pytest.raises(ValueError, match="no"):
        await together([after(1000, 1), failing()])
    assert now() == 0
    assert asyncio.all_tasks() == {asyncio.current_task()}
