"""An RL environment in which the model learns to state honest probabilities.

The model is asked how probable an event is. When the outcome is known, a proper scoring rule rewards the forecast: on
average, the true probability gets the highest reward. Each question is about a random urn, so the best possible score
is known and no data is downloaded.

    tinsmith train rl --example .
    tinsmith train rl --config run.yaml
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from tinker_cookbook.renderers import Renderer
from tinker_cookbook.rl.types import EnvGroupBuilder
from tinsmith.training import from_functions

ScoringRule: TypeAlias = Callable[[float, bool], float]
"""A function that returns a score for a forecast in [0, 1] and an outcome.

A higher score is better; the best score is 0.
"""

BALLS = 10
URN_BETA = 0.3
"""The value of both parameters of the beta distribution of red balls.

With a value below 1, most urns have many more balls of one colour, so 50 % is a bad forecast.
"""
QUESTION_TOKEN = 10
SMALLEST_NUMBER_TOKEN = 20
"""The first of the tokens for numbers of red balls.

A question in tokens is QUESTION_TOKEN, and then SMALLEST_NUMBER_TOKEN plus the number.
"""
TOKEN_FORECASTS = (0.0, 0.25, 0.5, 0.75, 1.0)
PERCENT = re.compile(r"(?<![\d.])(\d{1,3}(?:\.\d+)?)\s*%")
LOG_SCORE_LIMIT = 0.99
"""Forecasts are clipped to this probability, because the log score of a wrong forecast of 1 is minus infinity."""


@dataclass(frozen=True, slots=True)
class Question:
    """An urn with `red` of BALLS balls. `happened` says whether the drawn ball is red."""

    red: int
    happened: bool

    @property
    def probability(self) -> float:
        return self.red / BALLS


def environment(*, renderer: Renderer | None, group_size: int, count: int, seed: int) -> list[EnvGroupBuilder]:
    """Return `count` groups of forecasts.

    `tinsmith train rl` calls this function for `environment: forecaster:environment`.
    """
    return forecasting(questions(seed, count), group_size=group_size, renderer=renderer)


def forecasting(
    asked: Sequence[Question],
    *,
    group_size: int,
    rule: ScoringRule | None = None,
    renderer: Renderer | None = None,
) -> list[EnvGroupBuilder]:
    """Return one group of forecasts for each question. The rule is `brier_score` by default.

    With a renderer, the question is a sentence, and the answer contains a percentage. Without a renderer, the question
    is two tokens, and the first token of the answer stands for a multiple of 25 %. Without a renderer, every token is a
    valid answer, so even a random model can learn. The metric `env/all/forecast_error` is the distance from the true
    probability.
    """
    ask, read = (as_tokens, probability_of_token) if renderer is None else (as_sentence, probability_of_text)
    reward = Reward(rule or brier_score, read)
    return from_functions(asked, ask, reward, group_size=group_size, renderer=renderer, tags=["forecaster"])


@dataclass(frozen=True, slots=True)
class Reward:
    """The score of an answer, and the metrics to log with the score."""

    rule: ScoringRule
    read: Callable[..., float | None]

    def __call__(self, question: Question, answer: object) -> tuple[float, dict[str, float]]:
        forecast = self.read(answer)
        if forecast is None:  # an answer without a forecast must never pay
            return worst_score(self.rule), {"forecasts": 0.0}
        error = abs(forecast - question.probability)
        return self.rule(forecast, question.happened), {"forecasts": 1.0, "forecast_error": error}


def questions(seed: int, count: int) -> list[Question]:
    """Return `count` questions. The same seed gives the same questions."""
    generator = random.Random(seed)
    urns = [round(BALLS * generator.betavariate(URN_BETA, URN_BETA)) for _ in range(count)]
    return [Question(red, generator.random() < red / BALLS) for red in urns]


def as_sentence(question: Question) -> str:
    return (
        f"An urn has {question.red} red balls and {BALLS - question.red} blue ones. One is drawn. How probable is it "
        "that it is red? Answer with a percentage, as 35%."
    )


def as_tokens(question: Question) -> list[int]:
    return [QUESTION_TOKEN, SMALLEST_NUMBER_TOKEN + question.red]


def probability_of_text(answer: str) -> float | None:
    """Return the last percentage in the answer, or None without a percentage from 0 to 100."""
    percentages = [float(number) for number in PERCENT.findall(answer)]
    return percentages[-1] / 100 if percentages and percentages[-1] <= 100 else None


def probability_of_token(answer: Sequence[int]) -> float | None:
    """Return the forecast that the first token stands for, or None for an empty answer."""
    return TOKEN_FORECASTS[answer[0] % len(TOKEN_FORECASTS)] if answer else None


# Proper scoring rules: Gneiting and Raftery, Strictly Proper Scoring Rules, Prediction, and Estimation (2007).


def brier_score(forecast: float, happened: bool) -> float:
    """Return the negative squared error of the forecast, from -1 to 0.

    Raise ValueError unless the forecast is a probability.
    """
    return -((_checked(forecast) - happened) ** 2)


def log_score(forecast: float, happened: bool) -> float:
    """Return the logarithm of the probability that the forecast gives to the outcome, in nats, from -4.6 to 0.

    Raise ValueError unless the forecast is a probability.
    """
    clipped = min(max(_checked(forecast), 1 - LOG_SCORE_LIMIT), LOG_SCORE_LIMIT)
    return math.log(clipped if happened else 1 - clipped)


def expected_score(rule: ScoringRule, forecast: float, probability: float) -> float:
    """Return the mean score of a forecast for an event of this probability."""
    return probability * rule(forecast, True) + (1 - probability) * rule(forecast, False)


def best_score(asked: Sequence[Question], rule: ScoringRule = brier_score) -> float:
    """Return the mean score of forecasts with the true probabilities. No forecaster has a higher mean score."""
    return sum(expected_score(rule, question.probability, question.probability) for question in asked) / len(asked)


def worst_score(rule: ScoringRule) -> float:
    """Return the score of a forecast that is certain but wrong."""
    return min(rule(0.0, True), rule(1.0, False))


def _checked(forecast: float) -> float:
    if not 0 <= forecast <= 1:
        raise ValueError(f"a forecast must be a probability from 0 to 1, not {forecast}")
    return forecast
