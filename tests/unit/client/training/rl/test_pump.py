"""The number of groups sampled ahead, and their order."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from tinker_cookbook.rl.types import Env, EnvGroupBuilder, TrajectoryGroup
from tinsmith.training.rl.data_order import DataOrder, GroupPosition
from tinsmith.training.rl.pump import RolloutPump
from tinsmith.training.rl.rollouts import RolledOutGroup
from tinsmith.training.streams import MinibatchPlan

pytestmark = pytest.mark.pytorch


class Nothing(EnvGroupBuilder):
    async def make_envs(self) -> Sequence[Env]:
        raise NotImplementedError


class Sampling:
    """A rollout function whose groups stay in flight until a test ends them."""

    def __init__(self) -> None:
        self.under_way: dict[int, asyncio.Event] = {}
        self.begun: list[int] = []

    async def __call__(self, place: GroupPosition, builder: EnvGroupBuilder) -> RolledOutGroup:
        self.begun.append(place.number)
        self.under_way[place.number] = asyncio.Event()
        await self.under_way[place.number].wait()
        return RolledOutGroup([], 0, place, TrajectoryGroup([], [], []), (), None)

    def end(self, *numbers: int) -> None:
        for number in numbers:
            self.under_way[number].set()


async def settle() -> None:
    for _ in range(30):
        await asyncio.sleep(0)


def pump_of(sampling: Sampling, most_stale: int, in_flight: int = 100) -> RolloutPump:
    plan = MinibatchPlan(groups_per_step=2, groups_per_minibatch=1, most_stale_steps=most_stale)
    return RolloutPump(DataOrder([Nothing()]), plan, sampling, in_flight)


async def next_number(pump: RolloutPump) -> int:
    group = await anext(pump.groups)
    assert isinstance(group, RolledOutGroup)
    return group.place.number


async def test_on_policy_no_group_of_a_later_step_is_begun() -> None:
    sampling = Sampling()
    async with pump_of(sampling, 0) as pump:
        await settle()
        assert sampling.begun == [0, 1]
        sampling.end(0, 1)
        await settle()
        assert sampling.begun == [0, 1], "their step is not done"
        await pump.step_done()
        await settle()
        assert sampling.begun == [0, 1, 2, 3]


async def test_on_policy_groups_come_in_the_order_of_the_data() -> None:
    sampling = Sampling()
    async with pump_of(sampling, 0) as pump:
        await settle()
        sampling.end(1)
        await settle()
        assert len(pump.groups) == 0
        sampling.end(0)
        assert [await next_number(pump), await next_number(pump)] == [0, 1]


async def test_off_policy_as_many_steps_are_begun_as_the_bound_has_and_groups_come_as_they_arrive() -> None:
    sampling = Sampling()
    async with pump_of(sampling, 1) as pump:
        await settle()
        assert sampling.begun == [0, 1, 2, 3]
        sampling.end(2)
        assert await next_number(pump) == 2
        await pump.group_dropped()
        await settle()
        assert sampling.begun == [0, 1, 2, 3, 4]


async def test_no_more_are_in_flight_than_may_be() -> None:
    sampling = Sampling()
    async with pump_of(sampling, 1, in_flight=3) as pump:
        await settle()
        assert sampling.begun == [0, 1, 2]
        sampling.end(1)
        await settle()
        assert sampling.begun == [0, 1, 2, 3]
        assert await next_number(pump) == 1


async def test_an_error_of_the_data_is_raised_after_the_earlier_groups() -> None:
    class Broken(Sampling):
        async def __call__(self, place: GroupPosition, builder: EnvGroupBuilder) -> RolledOutGroup:
            if place.number == 1:
                raise ConnectionError("the server is gone")
            return RolledOutGroup([], 0, place, TrajectoryGroup([], [], []), (), None)

    async with pump_of(Broken(), 0) as pump:
        assert await next_number(pump) == 0
        with pytest.raises(ConnectionError, match="the server is gone"):
            await anext(pump.groups)


async def test_running_groups_are_cancelled_at_the_end() -> None:
    sampling = Sampling()
    cancelled: list[int] = []

    async def watched(place: GroupPosition, builder: EnvGroupBuilder) -> RolledOutGroup:
        try:
            return await sampling(place, builder)
        except asyncio.CancelledError:
            cancelled.append(place.number)
            raise

    plan = MinibatchPlan(groups_per_step=2, groups_per_minibatch=1)
    async with RolloutPump(DataOrder([Nothing()]), plan, watched, 2):
        await settle()
    assert sorted(cancelled) == [0, 1]
