"""Programs that train on what they sample, and on how good it was."""

from __future__ import annotations

from support.recipes.checks import (
    SAMPLER_IS_TRAINER,
    UNIFORM_AT_FIRST,
    UNIFORM_NATS,
    calls,
    calls_at_least,
    checkpoints,
    ends_above,
    falls,
    rises,
    starts_below,
    starts_near,
    stays_between,
    steps,
)
from support.recipes.names import BRIEF, GRADER, JUDGE, LLAMA, RUBRIC_FILE, RUBRIC_TEST_FILE, RUBRIC_TESTS
from support.recipes.program import recipe

REWARD = (
    recipe(
        "recipes.math_rl.train",
        [
            steps("env/all/format", 18),
            starts_near("env/all/format", 0.1, 0.1),
            ends_above("env/all/format", 0.6),
            rises("env/all/reward/total"),
            falls("env/all/ac_tokens_per_turn"),
            SAMPLER_IS_TRAINER,
            UNIFORM_AT_FIRST,
            calls(asample=18 * 12 * 24, forward_backward=18, optim_step=18, save_weights=4),
            # Fresh weights for each step's samples, and one more at the end.
            calls_at_least(save_weights_for_sampler=18),
            checkpoints("000005", "000010", "000015", "final"),
        ],
        # Samples are drawn without a seed. What is well-formed ends in time: of 3 tokens so few did at first that
        # learning began at the 9th step or at the 17th; of 16 it begins at the 7th or 8th. In groups of 16 few have
        # one at first, and at a rate of 1e-2 they once led away from all of them.
        model_name=LLAMA,
        env="arithmetic",
        groups_per_batch=12,
        group_size=24,
        max_tokens=16,
        max_steps=18,
        loss_fn="importance_sampling",
        learning_rate=7e-3,
        eval_every=0,
        save_every=5,
    ),
    recipe(
        "recipes.math_rl.train",
        [
            # Far from a random model's, which proves that the weights were loaded.
            starts_below("optim/entropy", UNIFORM_NATS - 0.5),
            SAMPLER_IS_TRAINER,
            calls(optim_step=2, load_weights=1),
        ],
        name="math_rl.train from chat_sl's checkpoint",
        every_run=True,
        after="chat_sl.train",
        model_name=LLAMA,
        load_checkpoint_path="{state_path}",
        env="arithmetic",
        groups_per_batch=8,
        group_size=8,
        max_steps=2,
    ),
    recipe(
        "recipes.math_rl.train",
        [steps("optim/kl_sample_train_v2", 3), SAMPLER_IS_TRAINER, calls(forward_backward=12, optim_step=6)],
        name="math_rl.train, minibatches of a stream",
        every_run=True,
        model_name=LLAMA,
        env="arithmetic",
        groups_per_batch=8,
        group_size=8,
        max_tokens=3,
        max_steps=3,
        loss_fn="ppo",
        loss_fn_config={"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
        num_substeps=2,
        compute_post_kl=True,
        **{"stream_minibatch_config.groups_per_batch": 8, "stream_minibatch_config.num_minibatches": 2},
    ),
    recipe(
        "recipes.math_rl.train",
        [SAMPLER_IS_TRAINER, calls(optim_step=3)],
        name="math_rl.train, cispo on gsm8k",
        model_name=BRIEF,
        env="gsm8k",
        groups_per_batch=8,
        group_size=8,
        max_steps=3,
        loss_fn="cispo",
    ),
    recipe(
        "recipes.rl_basic",
        [
            steps("env/all/correct", 1),
            # Nine digits, and sums that are one of them now and then.
            stays_between("env/all/correct", 0, 0.5),
            SAMPLER_IS_TRAINER,
            calls(asample=128 * 16, optim_step=1, save_weights=1),
            # The SDK divides what is as long as this.
            calls_at_least(forward_backward=2),
            checkpoints("final"),
        ],
        model_name=BRIEF,
        max_steps=1,
    ),
    recipe(
        "recipes.rl_loop",
        [steps("reward/total", 4), calls_at_least(forward_backward=2), calls(optim_step=4, asample=4 * 64)],
        model_name=BRIEF,
        batch_size=64,
        group_size=8,
        save_every=2,
    ),
    recipe(
        "recipes.rl_loop",
        [steps("reward/total", 2), calls(forward_backward=2, optim_step=2, asample=2 * 128)],
        name="rl_loop, gspo",
        model_name=BRIEF,
        batch_size=128,
        group_size=8,
        loss_fn="gspo",
    ),
    recipe(
        "recipes.rubric.train",
        [
            steps("env/all/rubric_score", 2),
            # The grader's digit in a box is the score.
            stays_between("env/all/rubric_score", 0, 9),
            stays_between("test/env/all/rubric_score", 0, 9),
            SAMPLER_IS_TRAINER,
            # Each answer is sampled and graded, those of the test before and after.
            calls(asample=2 * (2 * RUBRIC_TESTS + 2 * 8 * 4), forward_backward=2, optim_step=2),
        ],
        train_jsonl_path=RUBRIC_FILE,
        test_jsonl_path=RUBRIC_TEST_FILE,
        groups_per_batch=8,
        max_steps=2,
        defaults=[JUDGE, GRADER],
    ),
)
