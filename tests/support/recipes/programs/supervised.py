"""Programs that train on what they are given."""

from __future__ import annotations

from support.recipes.checks import (
    LOSS,
    UNIFORM_LOSS,
    calls,
    calls_at_least,
    checkpoints,
    ends_below,
    falls,
    prints,
    ran,
    steps,
)
from support.recipes.names import BASE, CHAT_FILE, LLAMA, QWEN, SEEING
from support.recipes.program import recipe

SUPERVISED = (
    recipe(
        "recipes.sl_loop",
        [
            steps(LOSS, 12),
            UNIFORM_LOSS,
            ends_below(LOSS, 4.0),
            calls(create_model=1, forward_backward=12, optim_step=12, save_weights=3, save_weights_for_sampler=1),
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
        [steps(LOSS, 4), UNIFORM_LOSS, falls(LOSS), calls_at_least(forward_backward=4, asample=1)],
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
            calls(optim_step=8, forward_backward=8),
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
    recipe(
        "recipes.vlm_classifier.train",
        [
            steps(LOSS, 4),
            UNIFORM_LOSS,
            falls(LOSS, by=0.5),
            # Sampled answers about photos of the test before and after.
            calls_at_least(asample=16),
            calls(forward_backward=4, optim_step=4),
            checkpoints("final"),
        ],
        log="experiment_dir={folder}/log",
        model_name=SEEING,
        batch_size=16,
        n_eval=16,
        max_steps=4,
        learning_rate=1e-2,
    ),
    recipe(
        "recipes.chat_sl.sweep",
        [
            steps(LOSS, 4 * 3),
            UNIFORM_LOSS,
            calls(create_model=4, forward_backward=4 * 3, optim_step=4 * 3, save_weights=4),
            prints("Best config per rank"),
        ],
        log="sweep_dir={folder}/sweep",
        recipe="sft",
        # Each run is a process of its own, with a model of its own.
        max_parallel=2,
        learning_rates=[1e-2, 2e-2],
        lora_ranks=[8, 32],
        training_budget_examples=3 * 32,
        **{"base.model_name": LLAMA, "base.dataset": CHAT_FILE, "base.batch_size": 32},
    ),
)
