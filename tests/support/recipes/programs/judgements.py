"""Programs that judge: forecasts, choices, steps of thoughts."""

from __future__ import annotations

from support.recipes.checks import SAMPLER_IS_TRAINER, calls, calls_at_least, prints, steps
from support.recipes.names import BRIEF, DEMONSTRATIONS, FORECASTS_FILE, LLAMA
from support.recipes.program import Program, recipe

JUDGEMENTS = (
    recipe(
        "recipes.sdft.train",
        [steps("sdft/mean_teacher_entropy", 2), calls_at_least(forward_backward=4), calls(optim_step=2)],
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
        [SAMPLER_IS_TRAINER, calls(optim_step=2)],
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
        [calls(optim_step=2), calls_at_least(forward_backward=4, asample=4)],
        model_name=LLAMA,
        data_path=FORECASTS_FILE,
        batch_size=8,
        max_steps=2,
        eval_every=1,
    ),
    recipe(
        "recipes.true_thinking_score.run_small_experiment",
        [calls_at_least(asample=3), prints("Results saved")],
        log="",
        every_run=True,
        defaults=[BRIEF],
    ),
    Program(
        "decisions.demo",
        ("-m", "tinker_cookbook.recipes.decisions.demo", f"model_name={LLAMA}"),
        [prints('"billing": 0.'), calls(asample=2)],
        typed="Why was I charged twice?\nHow do I sign in?\n\n",
        every_run=True,
    ),
)
