"""Programs that train on games of many turns: each prompt holds what was said before."""

from __future__ import annotations

from support.recipes.checks import SAMPLER_IS_TRAINER, calls, steps
from support.recipes.names import BRIEF, JUDGE
from support.recipes.program import recipe

NUMBER_TURNS, QUESTION_TURNS = 10, 20
"""The reward of a game that is never won, as a digit in a box wins none."""
GAMES = (
    recipe(
        "recipes.multiplayer_rl.guess_number.train",
        [
            steps("env/all/turns_per_episode", 2),
            SAMPLER_IS_TRAINER,
            calls(asample=2 * 8 * 2 * NUMBER_TURNS, forward_backward=2, optim_step=2),
        ],
        batch_size=8,
        group_size=2,
        max_steps=2,
        # The test set is 412 games.
        eval_every=0,
        defaults=[BRIEF],
    ),
    recipe(
        "recipes.multiplayer_rl.twenty_questions.train",
        [
            steps("env/all/turns_per_episode", 2),
            SAMPLER_IS_TRAINER,
            # One asks, and a model that does not learn answers.
            calls(asample=2 * 2 * 4 * 2 * QUESTION_TURNS, forward_backward=2, optim_step=2),
        ],
        batch_size=4,
        group_size=2,
        max_steps=2,
        # The test set is 3,200 games.
        eval_every=0,
        defaults=[BRIEF, JUDGE],
    ),
)
