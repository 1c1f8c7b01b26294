"""Proper rules: whoever is paid by one does best, on average, to say what they believe.

Both are rewards: more is better, and 0 the best. Gneiting and Raftery, Strictly Proper Scoring Rules (2007).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

ScoringRule: TypeAlias = Callable[[float, bool], float]
"""Of a probability in [0, 1] and what happened."""
SUREST = 0.99
"""The log score of a certainty that fails is without bound: no forecast counts as surer than this, either way."""


def brier_score(forecast: float, happened: bool) -> float:
    """Minus the squared distance, in [-1, 0]. Raises ValueError for what is no probability."""
    return -((_probability(forecast) - happened) ** 2)


def log_score(forecast: float, happened: bool) -> float:
    """The logarithm of what was given to what happened, in nats, from about -4.6 to 0. Raises as `brier_score`."""
    believed = min(max(_probability(forecast), 1 - SUREST), SUREST)
    return math.log(believed if happened else 1 - believed)


def expected_score(rule: ScoringRule, forecast: float, probability: float) -> float:
    """Of a forecast, where the event has this probability."""
    return probability * rule(forecast, True) + (1 - probability) * rule(forecast, False)


def worst_score(rule: ScoringRule) -> float:
    """Of a certainty that fails."""
    return min(rule(0.0, True), rule(1.0, False))


def _probability(forecast: float) -> float:
    if not 0 <= forecast <= 1:
        raise ValueError(f"a forecast is a probability from 0 to 1, and not {forecast}")
    return forecast
