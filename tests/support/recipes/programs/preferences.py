"""Programs that train on which of two answers is the better one."""

from __future__ import annotations

import math

from support.recipes.checks import calls, checkpoints, ends_above, ends_below, same, starts_near, steps
from support.recipes.names import BASE, LLAMA
from support.recipes.program import recipe

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
            calls(forward_backward=2 * 6, optim_step=6),
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
            calls(create_model=2, load_weights=1, optim_step=6),
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
