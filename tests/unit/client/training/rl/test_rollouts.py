"""Seeds of samples, and the first environment to fail."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
import tinker
from support.client.simulated_training import SimulatedSampler
from tinker_cookbook.rl.types import Action, ActionExtra, Env, EnvGroupBuilder, StepResult
from tinsmith.training.rl.rollouts import AllOrNone, GroupPolicy, sample_seed

pytestmark = pytest.mark.pytorch


def test_seeds_are_the_same_on_every_machine_and_differ_by_each_part() -> None:
    assert sample_seed(1, 2, 3, 4) == 1212204559
    places = [
        (seed, group, env, turn) for seed in range(5) for group in range(5) for env in range(5) for turn in (0, 1)
    ]
    seeds = {sample_seed(*place) for place in places}
    assert len(seeds) == len(places)
    assert all(0 <= seed < 2**31 for seed in seeds)


class Waits(Env):
    """A rollout that waits until it fails."""

    def __init__(self, error: Exception | None, ended: list[str]) -> None:
        self._error, self._ended = error, ended

    async def initial_observation(self) -> tuple[tinker.ModelInput, list[int]]:
        return tinker.ModelInput.from_ints([1]), []

    async def step(self, action: Action, *, extra: ActionExtra | None = None) -> StepResult:
        try:
            if self._error is not None:
                raise self._error
            await asyncio.Event().wait()
            raise AssertionError("the event is never set")
        finally:
            self._ended.append(type(self._error).__name__)


class Group(EnvGroupBuilder):
    def __init__(self, *errors: Exception | None) -> None:
        self._errors = errors
        self.ended: list[str] = []

    async def make_envs(self) -> Sequence[Env]:
        return [Waits(error, self.ended) for error in self._errors]


async def test_the_first_environment_to_fail_ends_the_others_of_its_group() -> None:
    group = Group(None, ZeroDivisionError("no reward"), None)
    policy = GroupPolicy(SimulatedSampler(lambda prompt, seed: [1]), 1)  # type: ignore[arg-type]
    async with asyncio.timeout(30):
        with pytest.raises(ZeroDivisionError, match="no reward"):
            await AllOrNone().execute(group, policy)
    assert sorted(group.ended) == ["NoneType", "NoneType", "ZeroDivisionError"]
