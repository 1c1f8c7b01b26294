"""Rollouts of groups of environments, with a policy that samples from a server."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
from dataclasses import dataclass, field, replace

import tinker
from tinker.types import RequestErrorCategory
from tinker_cookbook.completers import StopCondition, TinkerTokenCompleter, TokenCompleter, TokensWithLogprobs
from tinker_cookbook.rl.data_processing import assemble_training_data, compute_advantages
from tinker_cookbook.rl.rollout_strategy import RolloutResult, RolloutStrategy
from tinker_cookbook.rl.rollouts import do_group_rollout, do_single_rollout
from tinker_cookbook.rl.types import EnvGroupBuilder, RolloutError, TrajectoryGroup
from tinker_cookbook.utils.misc_utils import all_same
from typing_extensions import override

from tinsmith.training.rl.data_order import GroupPosition
from tinsmith.training.streams import RolloutGroup

REFUSALS = (tinker.BadRequestError, tinker.UnprocessableEntityError)


def sample_seed(seed: int, *place: int) -> int:
    """Return a 31-bit seed for one sample. The seed depends on the seed of the run and the position of the sample."""
    digest = hashlib.blake2b(repr((seed, *place)).encode(), digest_size=4).digest()
    return int.from_bytes(digest) >> 1


def is_refusal(error: BaseException) -> bool:
    """Return whether the server refused this prompt, for example because it is too long.

    A refused prompt is an error of the environment.
    """
    if isinstance(error, tinker.RequestFailedError):
        return error.category is RequestErrorCategory.User
    return isinstance(error, REFUSALS)


@dataclass
class GroupPolicy(TinkerTokenCompleter):
    """A policy that samples from a server.

    `seeds` contains the seed of the run and the number of the group. If `seeds` is None, the server chooses the seeds.
    Errors of the server are recorded in `server_errors`, because environments and strategies may catch the exceptions.
    """

    seeds: tuple[int, ...] | None = None
    server_errors: list[Exception] = field(default_factory=list)
    turn: int = 0

    def of_environment(self, number: int) -> GroupPolicy:
        """Return the policy for one environment in the group. All policies of the group share `server_errors`."""
        return replace(self, seeds=None if self.seeds is None else (*self.seeds, number), turn=0)

    @override
    async def __call__(
        self, model_input: tinker.ModelInput, stop: StopCondition, *, max_tokens: int | None = None
    ) -> TokensWithLogprobs:
        params = tinker.SamplingParams(
            stop=stop,
            max_tokens=self.max_tokens if max_tokens is None else min(self.max_tokens, max_tokens),
            temperature=self.temperature,
            seed=None if self.seeds is None else sample_seed(*self.seeds, self.turn),
        )
        self.turn += 1
        try:
            [sampled] = (await self.sampling_client.sample(model_input, 1, params)).sequences
        except Exception as error:
            if not is_refusal(error):
                self.server_errors.append(error)
            raise
        return TokensWithLogprobs(sampled.tokens, sampled.logprobs, sampled.stop_reason)

    def raise_server_error(self) -> None:
        """Raise the first error of the server, if an error has been recorded."""
        if self.server_errors:
            raise self.server_errors[0]


@dataclass(frozen=True)
class AllOrNone(RolloutStrategy):
    """A strategy that runs every environment in the group with different seeds.

    The first failure cancels the other environments.
    """

    @override
    async def execute(self, env_group_builder: EnvGroupBuilder, policy: TokenCompleter) -> RolloutResult:
        """Run the group. Raises the error of the first environment that fails."""
        envs = await env_group_builder.make_envs()
        policies = [_of_environment(policy, number) for number in range(len(envs))]
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(do_single_rollout(env_policy, env))
                    for env_policy, env in zip(policies, envs, strict=True)
                ]
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None
        return RolloutResult([task.result() for task in tasks], envs, [])


def _of_environment(policy: TokenCompleter, number: int) -> TokenCompleter:
    return policy.of_environment(number) if isinstance(policy, GroupPolicy) else policy


logger = logging.getLogger(__name__)

EQUAL_REWARDS = "equal rewards"
"""The reason for a successful group without data: all rewards are equal, so no answer is better than another."""
OF_THE_COOKBOOK_ALONE = "mask"
"""The name of an entry in the cookbook's data that losses do not accept."""


class UnfitRollout(ValueError):
    """An error for a rollout that cannot be used for training."""


@dataclass(frozen=True, slots=True)
class RolledOutGroup(RolloutGroup):
    """A group after all its rollouts.

    `fruitless` is the reason for a group without data: a kind of failure, or EQUAL_REWARDS.

    `fruitless` is None for a group with data.
    """

    place: GroupPosition
    trajectories: TrajectoryGroup
    tags: tuple[str, ...]
    fruitless: str | None


async def roll_out(
    builder: EnvGroupBuilder, place: GroupPosition, policy: GroupPolicy, policy_step: int, strategy: RolloutStrategy
) -> RolledOutGroup:
    """Roll out a group. If the environment fails, log a warning and return a group without data.

    Raises the errors of the server. A refused prompt raises no error, but counts as a failure of the environment.
    """
    try:
        return await _rolled_out(builder, place, policy, policy_step, strategy)
    except Exception as error:
        policy.raise_server_error()
        kind = type(error).__name__
        logger.warning("group %d of the data is not trained on: %s: %s", place.number, kind, error)
        failure = TrajectoryGroup([], [], [], [RolloutError(kind, str(error))])
        return RolledOutGroup([], policy_step, place, failure, (), kind)


async def _rolled_out(
    builder: EnvGroupBuilder, place: GroupPosition, policy: GroupPolicy, policy_step: int, strategy: RolloutStrategy
) -> RolledOutGroup:
    group = await do_group_rollout(builder, policy, strategy)
    policy.raise_server_error()
    tags = tuple(builder.logging_tags())
    data = training_data(group)
    return RolledOutGroup(data, policy_step, place, group, tags, None if data else EQUAL_REWARDS)


def training_data(group: TrajectoryGroup) -> list[tinker.Datum]:
    """Return data with advantages relative to the mean of the group. If all rewards are equal, return no data.

    Raises UnfitRollout.
    """
    rewards = group.get_total_rewards()
    if not all(math.isfinite(reward) for reward in rewards):
        raise UnfitRollout(f"rewards are {rewards}; they must be finite numbers")
    if all_same(rewards):
        return []
    assembled, _ = assemble_training_data([group], compute_advantages([group]))
    data = [_as_losses_take_it(datum) for datum in assembled]
    if any(datum.model_input.length == 0 for datum in data):
        raise UnfitRollout("an observation is empty: the first token of an answer has nothing before it")
    return data


def _as_losses_take_it(datum: tinker.Datum) -> tinker.Datum:
    inputs = {name: tensor for name, tensor in datum.loss_fn_inputs.items() if name != OF_THE_COOKBOOK_ALONE}
    return tinker.Datum(model_input=datum.model_input, loss_fn_inputs=inputs)
