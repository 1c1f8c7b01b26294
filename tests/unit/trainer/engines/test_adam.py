from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
from tinsmith_trainer.engines.adapters import check_adam, check_norm, step_metrics
from tinsmith_trainer.engines.base import AdamParams
from tinsmith_trainer.errors import UserError

SOUND = AdamParams(learning_rate=1e-3)


@pytest.mark.parametrize(
    "params",
    [
        SOUND,
        replace(SOUND, learning_rate=0.0),
        replace(SOUND, beta1=0.0, beta2=0.0),
        replace(SOUND, weight_decay=0.1, grad_clip_norm=1.0),
    ],
)
def test_valid_parameters_of_adamw_are_accepted(params: AdamParams) -> None:
    check_adam(params)


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("learning_rate", -1e-9, "from 0 to 1e"),
        ("learning_rate", 1e39, "from 0 to 1e"),  # no float32: torch stops in the middle of the step
        ("learning_rate", math.inf, "finite"),
        ("beta1", 1.0, "from 0 to below 1"),
        ("beta2", -0.1, "from 0 to below 1"),
        ("eps", 0.0, "from 1e-37"),
        ("eps", 1e39, "to 1e"),
        ("weight_decay", math.nan, "finite"),
        ("weight_decay", 1e39, "from 0 to 1e"),
        ("grad_clip_norm", -1.0, "at least 0"),
    ],
)
def test_anything_else_is_refused_by_its_name(name: str, value: float, allowed: str) -> None:
    with pytest.raises(UserError, match=f"{name} is {re.escape(str(value))}.*{allowed}"):
        check_adam(replace(SOUND, **{name: value}))


@pytest.mark.parametrize("norm", [math.nan, math.inf])
def test_a_norm_that_is_not_finite_is_the_users_to_mend(norm: float) -> None:
    with pytest.raises(UserError, match=f"was skipped: the gradient's norm is {norm}"):
        check_norm(norm)
    check_norm(1e30)


def test_a_step_tells_its_norm_its_rate_and_its_number() -> None:
    assert step_metrics(2.5, SOUND, 7) == {"grad_norm": 2.5, "learning_rate": 1e-3, "step": 7.0}
