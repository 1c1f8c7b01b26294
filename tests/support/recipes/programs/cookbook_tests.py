"""The cookbook's own tests: those of recipes run each with its defaults, for two steps."""

from __future__ import annotations

from support.recipes.checks import (
    LOSS,
    SAMPLER_IS_TRAINER,
    UNIFORM_LOSS,
    calls,
    calls_at_least,
    prints,
    starts_near,
    stays_between,
    steps,
)
from support.recipes.names import BRIEF, CHAT_TEACHER, JUDGE, MATH_TEACHER, QWEN, STUDENT
from support.recipes.program import own_tests

OF_WEIGHTS = (
    own_tests("tests/weights/test_lifecycle.py", [BRIEF], [prints("1 passed"), calls(save_weights_external=1)]),
    own_tests(
        "tests/weights/test_partial_lora_lifecycle.py",
        [QWEN, BRIEF],
        [prints("4 passed"), calls(create_model=4, save_weights_external=4)],
        *("-k", "not MoE"),
    ),
    own_tests(
        "tests/weights/test_weight_export_e2e.py",
        [QWEN],
        [prints("2 passed"), calls(create_model=1, save_weights_external=1)],
        *("-k", "TestDenseQwen3"),
    ),
)
OF_RECIPES = (
    own_tests(
        "tests/recipes/test_recipe_chat_sl.py",
        [STUDENT],
        # The second test continues from the end of the first, after which nothing is left to do.
        [prints("2 passed"), calls(create_model=1, load_weights=1, optim_step=2), calls_at_least(save_weights=2)],
    ),
    own_tests(
        "tests/recipes/test_recipe_rolling_checkpoints.py",
        [STUDENT],
        [prints("2 passed"), calls(create_model=1, load_weights=1, optim_step=4, save_weights=4)],
    ),
    own_tests(
        "tests/recipes/test_recipe_dpo.py",
        [STUDENT],
        [prints("1 passed"), steps("dpo_loss", 2), starts_near("dpo_loss", 0.6931, 1e-4), calls(optim_step=2)],
    ),
    own_tests(
        "tests/recipes/test_recipe_math_rl.py",
        [BRIEF],
        # In step, ahead of the weights, and in minibatches of a stream; all with stable_reinforce.
        [prints("3 passed"), SAMPLER_IS_TRAINER, calls(create_model=3), calls_at_least(optim_step=6)],
    ),
    own_tests(
        "tests/recipes/test_recipe_off_policy_reasoning.py",
        [STUDENT],
        [prints("1 passed"), steps(LOSS, 2), UNIFORM_LOSS, calls(optim_step=2)],
    ),
    own_tests(
        "tests/recipes/test_recipe_shorter.py",
        [BRIEF],
        [prints("1 passed"), SAMPLER_IS_TRAINER, calls(optim_step=2), calls_at_least(asample=2 * 32 * 16)],
    ),
    # One at a time: each names its log by the minute, and asks what to do with one that is there.
    own_tests(
        "tests/recipes/test_recipe_text_arena.py::test_text_arena",
        [BRIEF],
        [prints("1 passed"), SAMPLER_IS_TRAINER, calls(create_model=1, optim_step=2)],
        with_extras=True,
    ),
    own_tests(
        "tests/recipes/test_recipe_text_arena.py::test_text_arena_random_opponent",
        [BRIEF],
        [prints("1 passed"), SAMPLER_IS_TRAINER, calls(create_model=1, optim_step=2)],
        with_extras=True,
    ),
    own_tests(
        "tests/recipes/test_recipe_guess_number.py",
        [BRIEF],
        # Two tests of 103 numbers, each played by four, and two steps of 16 games.
        [prints("1 passed"), SAMPLER_IS_TRAINER, calls(asample=10 * (2 * 103 * 4 + 2 * 16), optim_step=2)],
    ),
    own_tests(
        "tests/recipes/test_recipe_on_policy_multi_teacher.py",
        [JUDGE, MATH_TEACHER, CHAT_TEACHER],
        [prints("1 passed"), SAMPLER_IS_TRAINER, calls(create_sampling_session=2, optim_step=1)],
    ),
    own_tests(
        "tests/recipes/test_recipe_on_policy_distillation.py",
        [STUDENT, JUDGE],
        [prints("1 passed"), stays_between("teacher_kl", 0, 20), SAMPLER_IS_TRAINER, calls(optim_step=2)],
    ),
)

OF_LITELLM = (
    own_tests(
        "tests/third_party/test_litellm.py",
        [BRIEF],
        [prints("6 passed"), calls(create_model=1, save_weights_for_sampler=1, asample=5)],
        with_extras=True,
    ),
)
OWN_TESTS = (*OF_WEIGHTS, *OF_RECIPES, *OF_LITELLM)
