"""What environments of one group are answered by: the weights of one step, with seeds that are the group's own."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass, field, replace

import tinker
from tinker.types import RequestErrorCategory
from tinker_cookbook.completers import StopCondition, TinkerTokenCompleter, TokenCompleter, TokensWithLogprobs
from tinker_cookbook.rl.rollout_strategy import RolloutResult, RolloutStrategy
from tinker_cookbook.rl.rollouts import do_single_rollout
from tinker_cookbook.rl.types import EnvGroupBuilder
from typing_extensions import override

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
        asked = tinker.SamplingParams(
            stop=stop,
            max_tokens=self.max_tokens if max_tokens is None else min(self.max_tokens, max_tokens),
            temperature=self.temperature,
            seed=None if self.seeds is None else sample_seed(*self.seeds, self.turn),
        )
        self.turn += 1
        try:
            [sampled] = (await self.sampling_client.sample(model_input, 1, asked)).sequences
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
                    group.create_task(do_single_rollout(own, env)) for own, env in zip(policies, envs, strict=True)
                ]
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None
        return RolloutResult([task.result() for task in tasks], envs, [])


def _of_environment(policy: TokenCompleter, number: int) -> TokenCompleter:
    return policy.of_environment(number) if isinstance(policy, GroupPolicy) else policy
