"""The comparison of a soak notices a step that is lost or doubled, and no rounding."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from support.comparing_runs import Ending, beyond_rounding, differences

STEPS, WEIGHTS = 50, 400
LEARNING_RATE, ROUNDING = 1e-3, 1e-6


def ending(steps: int = STEPS, seed: int = 0, rounding: float = ROUNDING) -> Ending:
    """Return the ending of a program whose weights move by a learning rate in each step, and are rounded by `seed`."""
    directions, noise = np.random.default_rng(99), np.random.default_rng(seed)
    weights = directions.standard_normal(WEIGHTS).astype(np.float32)
    found = Ending(STEPS)
    for step in range(STEPS):
        direction = np.sign(directions.standard_normal(WEIGHTS))
        if step < steps:
            weights += LEARNING_RATE * direction * (1 + rounding * noise.standard_normal(WEIGHTS))
        found.answers.append(weights[:10].tolist())
    found.tensors = {"weights": weights}
    return found


def test_two_runs_that_round_differently_are_as_far_apart_as_two_undisturbed_runs() -> None:
    assert beyond_rounding({"p": ending(seed=1)}, {"p": ending(seed=2)}, {"p": ending(seed=3)}) == []


def test_a_lost_step_is_beyond_rounding() -> None:
    found = beyond_rounding({"p": ending(STEPS - 1, seed=1)}, {"p": ending(seed=2)}, {"p": ending(seed=3)})
    assert [sentence.split(":")[0] for sentence in found] == ["p", "p"]


def _first_answer(one: Ending) -> None:
    one.answers[0] = [0.0]


def _last_bit(one: Ending) -> None:
    one.tensors["weights"][0] = np.nextafter(one.tensors["weights"][0], np.float32(9))


@pytest.mark.parametrize("change", [_first_answer, _last_bit])
def test_exact_runs_may_differ_in_nothing(change: Callable[[Ending], None]) -> None:
    one, other = ending(), ending()
    assert differences({"p": one}, {"p": other}) == []
    change(one)
    assert len(differences({"p": one}, {"p": other})) == 1
