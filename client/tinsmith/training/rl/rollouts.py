"""Groups of environments rolled out with a policy that samples."""

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
    """Of one sample, from the run's seed and where the sample is: 31 bits, the same ones on any machine."""
    digest = hashlib.blake2b(repr((seed, *place)).encode(), digest_size=4).digest()
    return int.from_bytes(digest) >> 1


def is_refusal(error: BaseException) -> bool:
    """Whether a server said no to this very prompt, as to one that is too long: the environment made it."""
    if isinstance(error, tinker.RequestFailedError):
        return error.category is RequestErrorCategory.User
    return isinstance(error, REFUSALS)


@dataclass
class GroupPolicy(TinkerTokenCompleter):
    """`seeds`: the run's seed and the group's number; None lets the server draw.

    What the server fails at is kept in `server_errors`, since environments and strategies may take it for their own.
    """

    seeds: tuple[int, ...] | None = None
    server_errors: list[Exception] = field(default_factory=list)
    turn: int = 0

    def of_environment(self, number: int) -> GroupPolicy:
        """For the environment of that number in the group. Errors come together."""
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
        """The first one, if there was any."""
        if self.server_errors:
            raise self.server_errors[0]


@dataclass(frozen=True)
class AllOrNone(RolloutStrategy):
    """Every environment of the group, each with its own seeds; the first that fails ends the others."""

    @override
    async def execute(self, env_group_builder: EnvGroupBuilder, policy: TokenCompleter) -> RolloutResult:
        """Raises what the first environment to fail raised."""
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
"""Why a group that did not fail has no data: no answer is better than the others."""
OF_THE_COOKBOOK_ALONE = "mask"
"""What its data says beside what losses take."""


class UnfitRollout(ValueError):
    """An environment made something that nothing can be trained on."""


@dataclass(frozen=True, slots=True)
class RolledOutGroup(RolloutGroup):
    """`fruitless` says why there is no data: the kind of failure, or EQUAL_REWARDS; None where there is some."""

    place: GroupPosition
    trajectories: TrajectoryGroup
    tags: tuple[str, ...]
    fruitless: str | None


async def roll_out(
    builder: EnvGroupBuilder, place: GroupPosition, policy: GroupPolicy, policy_step: int, strategy: RolloutStrategy
) -> RolledOutGroup:
    """Logs a failure of the environment as a warning, and returns a group without data.

    Raises what the server failed at, except that it refused a prompt, which is the environment's.
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
    """With advantages around the group's mean; none where its rewards are all equal. Raises UnfitRollout."""
    rewards = group.get_total_rewards()
    if not all(math.isfinite(reward) for reward in rewards):
        raise UnfitRollout(f"rewards are {rewards}; a reward is a finite number")
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
