"""recipes.preference.dpo.train: a loss that the client computes, against the logprobs of a reference sampler."""

from __future__ import annotations

import math

import pytest
from support.client.offline_hub import LLAMA
from support.client.recipes import RecipeRun, RecipeRunner

pytestmark = pytest.mark.timeout(700)

STEPS = 6


@pytest.fixture(scope="module")
def run(recipes: RecipeRunner) -> RecipeRun:
    return recipes.run(
        "preference.dpo.train",
        model_name=LLAMA,
        dataset="hhh",
        batch_size=16,
        max_length=256,
        max_steps=STEPS,
        learning_rate=1e-2,
    )


def test_before_the_first_step_trainer_and_reference_are_one_model(run: RecipeRun) -> None:
    """Any difference of the trainer's forward and the sampler's prompt logprobs moves the loss away from ln 2."""
    assert run.series("dpo_loss")[0] == pytest.approx(math.log(2), abs=1e-4)
    assert run.series("margin")[0] == pytest.approx(0, abs=1e-4)


def test_the_chosen_answers_win(run: RecipeRun) -> None:
    losses = run.series("dpo_loss")

    assert len(losses) == STEPS
    assert losses[-1] < 0.3
    assert run.series("accuracy")[-1] == 1.0
    assert run.series("margin")[-1] > 1.0


def test_the_loss_of_a_custom_function_comes_back_as_it_went(run: RecipeRun) -> None:
    assert run.series("loss:sum") == run.series("dpo_loss")


def test_each_step_is_a_forward_a_backward_and_a_step(run: RecipeRun) -> None:
    assert run.requests["forward_backward"] == 2 * STEPS
    assert run.requests["optim_step"] == STEPS


def test_the_final_checkpoint_holds_training_state_and_sampler_weights(run: RecipeRun, recipes: RecipeRunner) -> None:
    final = run.checkpoint("final")
    paths = {final["state_path"], final["sampler_path"]}

    assert paths <= recipes.stored_checkpoints(final["state_path"])
