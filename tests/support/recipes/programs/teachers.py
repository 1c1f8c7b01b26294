"""Programs that train on what other models, or they themselves, think of it."""

from __future__ import annotations

import math

from support.recipes.checks import (
    LOSS,
    SAMPLER_IS_TRAINER,
    UNIFORM_LOSS,
    calls,
    falls,
    prints,
    starts_near,
    stays_between,
    steps,
)
from support.recipes.names import (
    BASE,
    BENCHMARKS,
    BRIEF,
    CHAT_FILE,
    DEMONSTRATIONS,
    EXAMINATIONS,
    EXAMPLES,
    GRADER,
    JUDGE,
    LLAMA,
    QWEN,
    SENTENCES,
)
from support.recipes.program import recipe

TEACHERS = (
    recipe(
        "recipes.distillation.on_policy_distillation",
        [stays_between("teacher_kl", 0, 20), SAMPLER_IS_TRAINER, calls(optim_step=3, create_model=1)],
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
        [starts_near("teacher_kl", 0, 1e-6), calls(optim_step=1)],
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
        [calls(optim_step=2), SAMPLER_IS_TRAINER],
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
            calls(asample=2 * 4 * 3, forward_backward=3, optim_step=3, create_sampling_session=2),
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
        "recipes.prompt_distillation.create_data",
        [calls(asample=SENTENCES), prints("Saved data to")],
        every_run=True,
        log="output_file={folder}/data.jsonl",
        defaults=[GRADER],
    ),
    recipe(
        "recipes.prompt_distillation.train",
        [steps(LOSS, 4), UNIFORM_LOSS, falls(LOSS), calls(optim_step=4)],
        model_name=LLAMA,
        file_path=CHAT_FILE,
        batch_size=32,
        max_steps=4,
        learning_rate=1e-2,
    ),
    recipe(
        "recipes.sdft.benchmark",
        [
            # The base model's, and those of what either training left.
            prints("Base model Results"),
            prints("BENCHMARK SUMMARY"),
            steps(LOSS, 2),
            steps("sdft/mean_teacher_entropy", 2),
            calls(create_model=2, optim_step=4, asample=3 * EXAMINATIONS + 2 * 2 * 8),
        ],
        every_run=True,
        log="log_root={folder}",
        model_name=BRIEF,
        data_dir=BENCHMARKS,
        groups_per_batch=8,
        max_steps=2,
        sft_batch_size=8,
        sft_max_steps=2,
    ),
    recipe(
        "recipes.sdft.run_continual_learning",
        [
            prints("EXPERIMENT COMPLETE"),
            # The second stage of each method continues from the weights of its first.
            calls(load_weights=2, optim_step=4 * 2),
            steps(LOSS, 2 * 2),
            steps("sdft/mean_teacher_entropy", 2 * 2),
        ],
        every_run=True,
        log="log_root={folder}",
        model_name=BRIEF,
        data_dir=BENCHMARKS,
        batch_size=EXAMPLES // 2,
        methods="sft,sdft_topk",
        learning_rates="1e-3",
    ),
)
