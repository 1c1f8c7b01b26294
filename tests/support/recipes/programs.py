"""The programs of `make recipes`, in the order in which they run.

Arguments make a run short, choose a model or a dataset, or a rate at which LoRA moves a random model; whatever else a
recipe has by default is left alone.
"""

from __future__ import annotations

import math

from support.recipes.checks import (
    SAMPLER_IS_TRAINER,
    UNIFORM_AT_FIRST,
    UNIFORM_NATS,
    asked,
    asked_at_least,
    checkpoints,
    ends_above,
    ends_below,
    falls,
    prints,
    ran,
    rises,
    same,
    starts_below,
    starts_near,
    stays_between,
    steps,
)
from support.recipes.names import BASE, BRIEF, CHAT_FILE, DEMONSTRATIONS, FORECASTS_FILE, JUDGE, LLAMA, QWEN
from support.recipes.other_programs import OTHERS
from support.recipes.program import Program, recipe

LOSS = "train_mean_nll"
UNIFORM_LOSS = starts_near(LOSS, 6.25, 0.35)

SUPERVISED = (
    recipe(
        "recipes.sl_loop",
        [
            steps(LOSS, 12),
            UNIFORM_LOSS,
            ends_below(LOSS, 4.0),
            asked(create_model=1, forward_backward=12, optim_step=12, save_weights=3, save_weights_for_sampler=1),
            ran(1 + 12 + 12 + 4),
            checkpoints("000005", "000010", "final"),
        ],
        every_run=True,
        model_name=BASE,
        batch_size=16,
        max_steps=12,
        max_length=512,
        save_every=5,
        learning_rate=1e-2,
    ),
    recipe(
        "recipes.sl_basic",
        [steps(LOSS, 4), UNIFORM_LOSS, falls(LOSS), asked_at_least(forward_backward=4, asample=1)],
        model_name=QWEN,
        learning_rate=1e-2,
        max_steps=4,
        eval_every=1,
        num_epochs=4,
    ),
    recipe(
        "recipes.chat_sl.train",
        [
            steps(LOSS, 8),
            UNIFORM_LOSS,
            falls(LOSS, by=1.0),
            asked(optim_step=8, forward_backward=8),
            checkpoints("000003", "000006", "final"),
        ],
        every_run=True,
        model_name=LLAMA,
        dataset=CHAT_FILE,
        batch_size=32,
        max_steps=8,
        save_every=3,
        learning_rate=2e-2,
    ),
)

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
            asked(asample=18 * 12 * 24, forward_backward=18, optim_step=18, save_weights=4),
            # Fresh weights for each step's samples, and one more at the end.
            asked_at_least(save_weights_for_sampler=18),
            checkpoints("000005", "000010", "000015", "final"),
        ],
        every_run=True,
        # Samples are drawn without a seed. What is well-formed ends in time: of 3 tokens so few did at first that learning
        # began at the 9th step or at the 17th; of 16 it begins at the 7th or 8th. In groups of 16 few have one at first,
        # and at a rate of 1e-2 they once led away from all of them.
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
            asked(optim_step=2, load_weights=1),
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
        [steps("optim/kl_sample_train_v2", 3), SAMPLER_IS_TRAINER, asked(forward_backward=12, optim_step=6)],
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
        [SAMPLER_IS_TRAINER, asked(optim_step=3)],
        name="math_rl.train, cispo on gsm8k",
        model_name=BRIEF,
        env="gsm8k",
        groups_per_batch=8,
        group_size=8,
        max_steps=3,
        loss_fn="cispo",
    ),
    recipe(
        "recipes.rl_loop",
        [steps("reward/total", 4), asked_at_least(forward_backward=2), asked(optim_step=4, asample=4 * 64)],
        model_name=BRIEF,
        batch_size=64,
        group_size=8,
        save_every=2,
    ),
)

PREFERENCE = (
    recipe(
        "recipes.preference.dpo.train",
        [
            steps("dpo_loss", 6),
            # Any difference of the trainer's forward and the sampler's prompt logprobs moves the loss away from ln 2.
            starts_near("dpo_loss", math.log(2), 1e-4),
            starts_near("margin", 0.0, 1e-4),
            ends_below("dpo_loss", 0.3),
            ends_above("margin", 1.0),
            ends_above("accuracy", 0.99),
            same("loss:sum", "dpo_loss"),
            asked(forward_backward=2 * 6, optim_step=6),
        ],
        every_run=True,
        model_name=LLAMA,
        dataset="hhh",
        batch_size=16,
        max_length=256,
        max_steps=6,
        learning_rate=1e-2,
    ),
    recipe(
        "recipes.preference.rlhf.rlhf_pipeline",
        [
            checkpoints("final", "final", "final"),
            asked(create_model=2, load_weights=1, optim_step=6),
        ],
        log="",
        base_model=BASE,
        short_name="tiny",
        batch_size=8,
        max_length=256,
        rl_max_tokens=16,
        rl_group_size=4,
        max_steps=2,
        save_every=0,
        eval_every=0,
    ),
)

TEACHERS = (
    recipe(
        "recipes.distillation.on_policy_distillation",
        [stays_between("teacher_kl", 0, 20), SAMPLER_IS_TRAINER, asked(optim_step=3, create_model=1)],
        every_run=True,
        model_name=BASE,
        teacher_model=BRIEF,
        dataset="deepmath",
        groups_per_batch=8,
        max_tokens=16,
        max_steps=3,
    ),
    recipe(
        "recipes.distillation.on_policy_distillation",
        [starts_near("teacher_kl", 0, 1e-6), asked(optim_step=1)],
        name="distillation.on_policy_distillation, a teacher of itself",
        model_name=BASE,
        teacher_model=BASE,
        dataset="deepmath",
        groups_per_batch=8,
        max_tokens=16,
        max_steps=1,
    ),
    recipe(
        "recipes.distillation.on_policy_multi_teacher",
        [asked(optim_step=2), SAMPLER_IS_TRAINER],
        model_name=QWEN,
        deepmath_teacher_model=BRIEF,
        tulu3_teacher_model=JUDGE,
        deepmath_groups_per_batch=4,
        tulu3_groups_per_batch=4,
        max_tokens=16,
        max_steps=2,
    ),
    recipe(
        "recipes.sdft.train",
        [
            steps("sdft/mean_teacher_entropy", 3),
            # Without top-k logprobs the recipe would learn from nothing, and say 0.
            stays_between("sdft/mean_teacher_entropy", 0.1, math.log(4)),
            stays_between("grad_norm", 0, math.inf),
            asked(asample=2 * 4 * 3, forward_backward=3, optim_step=3, create_sampling_session=2),
        ],
        every_run=True,
        model_name=LLAMA,
        dataset="toolalpaca",
        # Its own evaluation ends in an AttributeError before it asks the server for anything.
        eval_every=0,
        toolalpaca_data_path=DEMONSTRATIONS,
        topk=4,
        groups_per_batch=4,
        max_tokens=16,
        max_steps=3,
        teacher_sync_every=2,
        learning_rate=1e-2,
    ),
    recipe(
        "recipes.prompt_distillation.train",
        [steps(LOSS, 4), UNIFORM_LOSS, falls(LOSS), asked(optim_step=4)],
        model_name=LLAMA,
        file_path=CHAT_FILE,
        batch_size=32,
        max_steps=4,
        learning_rate=1e-2,
    ),
)

JUDGEMENTS = (
    recipe(
        "recipes.sdft.train",
        [steps("sdft/mean_teacher_entropy", 2), asked_at_least(forward_backward=4), asked(optim_step=2)],
        name="sdft.train, reversed",
        model_name=LLAMA,
        dataset="toolalpaca",
        # Its own evaluation ends in an AttributeError before it asks the server for anything.
        eval_every=0,
        toolalpaca_data_path=DEMONSTRATIONS,
        reverse=True,
        groups_per_batch=4,
        max_tokens=16,
        max_steps=2,
        learning_rate=1e-2,
    ),
    recipe(
        "recipes.forecasting.train",
        [SAMPLER_IS_TRAINER, asked(optim_step=2)],
        model_name=BRIEF,
        renderer_name="qwen3_5_disable_thinking",
        data_path=FORECASTS_FILE,
        groups_per_batch=4,
        group_size=4,
        max_steps=2,
        max_tokens=16,
    ),
    recipe(
        "recipes.decisions.forecasting",
        [asked(optim_step=2), asked_at_least(forward_backward=4, asample=4)],
        model_name=LLAMA,
        data_path=FORECASTS_FILE,
        batch_size=8,
        max_steps=2,
        eval_every=1,
    ),
    recipe(
        "recipes.true_thinking_score.run_small_experiment",
        [asked_at_least(asample=3), prints("Results saved")],
        log="",
        defaults=[BRIEF],
    ),
    Program(
        "decisions.demo",
        ("-m", "tinker_cookbook.recipes.decisions.demo", f"model_name={LLAMA}"),
        [prints('"billing": 0.'), asked(asample=2)],
        typed="Why was I charged twice?\nHow do I sign in?\n\n",
        every_run=True,
    ),
)

PROGRAMS: tuple[Program, ...] = (*SUPERVISED, *REWARD, *PREFERENCE, *TEACHERS, *JUDGEMENTS, *OTHERS)
