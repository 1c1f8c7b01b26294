"""recipes.sl_loop: supervised fine-tuning with pipelined steps and periodic checkpoints."""

from __future__ import annotations

import pytest
from support.client.offline_hub import QWEN
from support.client.recipes import RecipeRun, RecipeRunner

pytestmark = pytest.mark.timeout(700)

STEPS = 12
SAVES = 4  # two periodic ones, and "final" for training and for sampling


@pytest.fixture(scope="module")
def run(recipes: RecipeRunner) -> RecipeRun:
    return recipes.run(
        "sl_loop",
        model_name=QWEN,
        batch_size=16,
        max_steps=STEPS,
        max_length=512,
        save_every=5,
        # LoRA moves a random base little at the recipe's usual rates.
        learning_rate=1e-2,
    )


def test_the_loss_starts_at_a_uniform_guess_and_falls(run: RecipeRun) -> None:
    losses = run.series("train_mean_nll")

    assert len(losses) == STEPS
    assert 5.9 < losses[0] < 6.6
    assert losses[-1] < 4.0


def test_every_call_was_asked_once(run: RecipeRun) -> None:
    asked = ("create_model", "forward_backward", "optim_step", "save_weights", "save_weights_for_sampler")

    assert {name: run.requests[name] for name in asked} == dict(zip(asked, (1, STEPS, STEPS, 3, 1), strict=True))


def test_every_operation_ran_once_and_none_failed(run: RecipeRun, recipes: RecipeRunner) -> None:
    expected = 1 + STEPS + STEPS + SAVES

    assert recipes.operations(QWEN, at_least=expected) == {"done": expected, "failed": 0}


def test_checkpoints_are_where_the_recipe_says(run: RecipeRun, recipes: RecipeRunner) -> None:
    assert [checkpoint["name"] for checkpoint in run.checkpoints] == ["000005", "000010", "final"]
    paths = [path for row in run.checkpoints for path in (row["state_path"], row.get("sampler_path")) if path]
    assert len(paths) == SAVES
    assert set(paths) == recipes.stored_checkpoints(paths[0])
