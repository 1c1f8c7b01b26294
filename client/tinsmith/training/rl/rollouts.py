"""One group of environments, rolled out to data: whatever an environment does costs its group, and no other."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

import tinker
from tinker_cookbook.rl.data_processing import assemble_training_data, compute_advantages
from tinker_cookbook.rl.rollout_strategy import RolloutStrategy
from tinker_cookbook.rl.rollouts import do_group_rollout
from tinker_cookbook.rl.types import EnvGroupBuilder, RolloutError, TrajectoryGroup
from tinker_cookbook.utils.misc_utils import all_same

from tinsmith.training.rl.data_order import GroupPlace
from tinsmith.training.rl.policy import GroupPolicy
from tinsmith.training.streams.rollouts import RolloutGroup

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

    place: GroupPlace
    trajectories: TrajectoryGroup
    tags: tuple[str, ...]
    fruitless: str | None


async def roll_out(
    builder: EnvGroupBuilder, place: GroupPlace, policy: GroupPolicy, policy_step: int, strategy: RolloutStrategy
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
    builder: EnvGroupBuilder, place: GroupPlace, policy: GroupPolicy, policy_step: int, strategy: RolloutStrategy
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
