"""The sampling of groups ahead of training. The number and the staleness of the groups are limited."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from tinker_cookbook.rl.types import EnvGroupBuilder

from tinsmith.training.rl.data_order import DataOrder, GroupPosition
from tinsmith.training.rl.rollouts import RolledOutGroup
from tinsmith.training.streams import BufferClosed, MinibatchPlan, RolloutBuffer

RollOut: TypeAlias = Callable[[GroupPosition, EnvGroupBuilder], Awaitable[RolledOutGroup]]


@dataclass(slots=True)
class Window:
    """The number of groups that may be begun.

    Groups may be begun for the current step, and for as many later steps as the limit on staleness allows. For
    on-policy training, only the groups of one step may be begun. So no group is sampled from weights that are too old
    for the step that uses the group.
    """

    plan: MinibatchPlan
    begun: int = 0
    steps: int = 0
    dropped: int = 0

    @property
    def size(self) -> int:
        """Return the largest number of groups that may be in flight or waiting."""
        return (1 + self.plan.most_stale_steps) * self.plan.groups_per_step

    @property
    def is_open(self) -> bool:
        return self.begun < self.size + self.steps * self.plan.groups_per_step + self.dropped


class RolloutPump:
    """A context that rolls out the groups of `order` into the buffer `groups`, at most `most_in_flight` at once.

    In on-policy training, groups arrive in data order, so that a run is reproducible. In off-policy training, groups
    arrive in the order in which their rollouts finish. Errors of `roll_out` and of the data are raised from `groups`.
    Use a pump on only one event loop.
    """

    def __init__(self, order: DataOrder, plan: MinibatchPlan, roll_out: RollOut, most_in_flight: int) -> None:
        self.window = Window(plan)
        self.groups = RolloutBuffer(self.window.size)
        self._order = order
        self._roll_out = roll_out
        self._in_turn = plan.most_stale_steps == 0
        self._slots = asyncio.Semaphore(most_in_flight)
        self._changed = asyncio.Condition()
        self._turn = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def step_done(self) -> None:
        """Record an optimizer step. A step without data counts, too."""
        async with self._changed:
            self.window.steps += 1
            self._changed.notify_all()

    async def group_dropped(self) -> None:
        async with self._changed:
            self.window.dropped += 1
            self._changed.notify_all()

    async def __aenter__(self) -> RolloutPump:
        self._start(self._begin_groups)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.groups.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _begin_groups(self) -> None:
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: self.window.is_open)
            await self._slots.acquire()
            place, builder = next(self._order)
            self._start(partial(self._group, self.window.begun, place, builder))
            self.window.begun += 1

    async def _group(self, turn: int, place: GroupPosition, builder: EnvGroupBuilder) -> None:
        try:
            group = await self._roll_out(place, builder)
        finally:
            self._slots.release()
        async with self._changed:
            await self._changed.wait_for(lambda: not self._in_turn or self._turn == turn)
        with suppress(BufferClosed):
            await self.groups.put(group)
        async with self._changed:
            self._turn += 1
            self._changed.notify_all()

    def _start(self, work: Callable[[], Awaitable[None]]) -> None:
        """Start a task.

        `work` is a function and not a coroutine. A coroutine would never be awaited if the task is cancelled before its
        start.
        """
        task = asyncio.ensure_future(self._reported(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _reported(self, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except Exception as error:
            await self.groups.close(error)
