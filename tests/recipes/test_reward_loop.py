"""recipes.math_rl.train: reinforcement learning from a reward, 288 samples a step on refreshed weights."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import pytest
from support.client.offline_hub import LLAMA, VOCAB_SIZE
from support.client.recipes import RecipeRun, RecipeRunner

pytestmark = pytest.mark.timeout(700)

# Samples are drawn without a seed: the first well-formed answers come early or late, and then learning is quick. In
# groups of 16 few have one at first, and at a rate of 1e-2 their gradients once led away from all answers for good.
STEPS = 18
GROUPS = 12
GROUP_SIZE = 24


@pytest.fixture(scope="module")
def run(recipes: RecipeRunner) -> RecipeRun:
    return recipes.run(
        "math_rl.train",
        model_name=LLAMA,
        env="arithmetic",
        groups_per_batch=GROUPS,
        group_size=GROUP_SIZE,
        max_tokens=3,
        max_steps=STEPS,
        loss_fn="importance_sampling",
        learning_rate=7e-3,
        eval_every=0,
        save_every=5,
    )


def test_the_model_learns_what_is_rewarded(run: RecipeRun) -> None:
    """A well-formed answer ends with the stop token: a random model forgets it, a rewarded one sends little else."""
    well_formed, tokens = run.series("env/all/format"), run.series("env/all/ac_tokens_per_turn")
    reward = run.series("env/all/reward/total")

    assert len(well_formed) == STEPS
    assert well_formed[0] < 0.2
    assert ending(well_formed) > 0.6
    assert ending(reward) > reward[0]
    assert ending(tokens) < tokens[0]


def ending(series: Sequence[float]) -> float:
    """Where it has come to: one step of random samples says little."""
    return statistics.median(series[-5:])


def test_sampler_and_trainer_agree_on_every_sampled_token(run: RecipeRun) -> None:
    gaps = run.series("optim/kl_sample_train_v2")

    assert len(gaps) == STEPS
    assert max(gaps) < 1e-4


def test_an_untrained_model_is_as_unsure_as_can_be(run: RecipeRun) -> None:
    assert run.series("optim/entropy")[0] == pytest.approx(math.log(VOCAB_SIZE), abs=0.25)


def test_every_step_sampled_and_trained(run: RecipeRun) -> None:
    asked = ("asample", "forward_backward", "optim_step", "save_weights")

    assert {name: run.requests[name] for name in asked} == {
        "asample": STEPS * GROUPS * GROUP_SIZE,
        "forward_backward": STEPS,
        "optim_step": STEPS,
        "save_weights": 4,
    }
    # Fresh weights for each step's samples, and one more at the end.
    assert run.requests["save_weights_for_sampler"] >= STEPS


def test_checkpoints_hold_both_training_state_and_sampler_weights(run: RecipeRun, recipes: RecipeRunner) -> None:
    assert [checkpoint["name"] for checkpoint in run.checkpoints] == ["000005", "000010", "000015", "final"]
    paths = [checkpoint[kind] for checkpoint in run.checkpoints for kind in ("state_path", "sampler_path")]
    assert set(paths) == recipes.stored_checkpoints(paths[0])
