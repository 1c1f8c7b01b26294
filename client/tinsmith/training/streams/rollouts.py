"""Rollouts on their way from whoever samples to whoever trains."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import tinker
from typing_extensions import override


@dataclass(frozen=True, slots=True)
class RolloutGroup:
    """What one group of an environment came to, ready to train on.

    `policy_step`: how many optimizer steps the weights had had that it was sampled from. Without data, as a group
    whose rewards are all equal, it counts as a group of its step and trains nothing.
    """

    data: Sequence[tinker.Datum]
    policy_step: int


class BufferClosed(Exception):
    """Nobody takes rollouts from here any more."""


class RolloutBuffer(AsyncIterator[RolloutGroup]):
    """Holds `groups` of them at most: whoever samples further ahead waits in `put`. For one event loop."""

    def __init__(self, groups: int) -> None:
        if groups < 1:
            raise ValueError(f"a buffer of {groups} groups holds none; give 1 or more")
        self._most = groups
        self._waiting: deque[RolloutGroup] = deque()
        self._changed = asyncio.Condition()
        self._is_closed = False
        self._error: BaseException | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    async def put(self, group: RolloutGroup) -> None:
        """Returns when there is room. Raises BufferClosed."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._is_closed or len(self._waiting) < self._most)
            if self._is_closed:
                raise BufferClosed("this buffer was closed, so the rollout is not trained on")
            self._waiting.append(group)
            self._changed.notify_all()

    async def close(self, error: BaseException | None = None) -> None:
        """After the last rollout. What waits is still trained on; then iteration ends, or raises `error`."""
        async with self._changed:
            self._is_closed, self._error = True, error
            self._changed.notify_all()

    @override
    async def __anext__(self) -> RolloutGroup:
        async with self._changed:
            await self._changed.wait_for(lambda: self._is_closed or len(self._waiting) > 0)
            if self._waiting:
                group = self._waiting.popleft()
                self._changed.notify_all()
                return group
        raise self._error or StopAsyncIteration
