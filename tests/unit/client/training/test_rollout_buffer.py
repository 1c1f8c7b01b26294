"""The rollout buffer holds back samplers that run ahead, and loses nothing at the end."""

from __future__ import annotations

import asyncio

import pytest
from tinsmith.training.streams import BufferClosed, RolloutBuffer, RolloutGroup


def group(step: int) -> RolloutGroup:
    return RolloutGroup([], step)


async def test_a_producer_waits_until_there_is_room() -> None:
    buffer = RolloutBuffer(2)
    producer = asyncio.create_task(put_all(buffer, 5))
    while len(buffer) < 2:
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert (len(buffer), producer.done()) == (2, False)
    taken = [taken.policy_step async for taken in buffer]
    await producer
    assert taken == [0, 1, 2, 3, 4]


async def put_all(buffer: RolloutBuffer, count: int) -> None:
    for number in range(count):
        await buffer.put(group(number))
    await buffer.close()


async def test_a_waiting_producer_gets_an_error_when_training_has_ended() -> None:
    buffer = RolloutBuffer(1)
    await buffer.put(group(0))
    waiting = asyncio.create_task(buffer.put(group(1)))
    await asyncio.sleep(0)
    await buffer.close()
    with pytest.raises(BufferClosed):
        await waiting


def test_a_buffer_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="it must be 1 or more"):
        RolloutBuffer(0)


async def test_waiting_groups_are_taken_before_the_error_of_their_producer_is_raised() -> None:
    buffer = RolloutBuffer(3)
    await buffer.put(group(0))
    await buffer.close(RuntimeError("the environment is gone"))
    assert (await anext(buffer)).policy_step == 0
    with pytest.raises(RuntimeError, match="the environment is gone"):
        await anext(buffer)
