"""A worked environment: the model says how probable something is, and is paid by a proper rule when it is known.

Questions are about urns, drawn from a seed: it is known what the best forecaster earns, and nothing is fetched.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tinker_cookbook.renderers import Renderer
from tinker_cookbook.rl.types import EnvGroupBuilder

from tinsmith.training.environments.functions import from_functions
from tinsmith.training.environments.scoring_rules import ScoringRule, brier_score, expected_score, worst_score

BALLS = 10
LOPSIDED = 0.3
"""Urns are drawn from a beta distribution with this for both parameters: were most balanced, 50 % would nearly do."""
QUESTION_TOKEN = 10
"""Where prompts are tokens: before the number of red balls, which is a token itself."""
SMALLEST_NUMBER_TOKEN = 20
FORECASTS_IN_TOKENS = (0.0, 0.25, 0.5, 0.75, 1.0)
PERCENT = re.compile(r"(?<![\d.])(\d{1,3}(?:\.\d+)?)\s*%")


@dataclass(frozen=True, slots=True)
class Question:
    """Of an urn with `red` of BALLS balls; `happened` says whether the one that was drawn is red."""

    red: int
    happened: bool

    @property
    def probability(self) -> float:
        return self.red / BALLS


def questions(seed: int, count: int) -> list[Question]:
    """The same ones for the same seed; the more of them, the nearer outcomes are to probabilities."""
    drawn = random.Random(seed)
    urns = [round(BALLS * drawn.betavariate(LOPSIDED, LOPSIDED)) for _ in range(count)]
    return [Question(red, drawn.random() < red / BALLS) for red in urns]


def forecasting(
    asked: Sequence[Question], *, group_size: int, rule: ScoringRule = brier_score, renderer: Renderer | None = None
) -> list[EnvGroupBuilder]:
    """Groups of forecasts, one for each question.

    With a renderer the question is a sentence and the answer has a percentage in it. Without, the question is two
    tokens, and the first token of the answer is a quarter by its remainder: any model can say each of them, also one
    that knows no language. `env/all/forecast_error` is the distance to the true probability.
    """
    ask, read = (as_tokens, probability_of_token) if renderer is None else (as_sentence, probability_of_text)
    return from_functions(asked, ask, _Score(rule, read), group_size=group_size, renderer=renderer, tags=["forecaster"])


def best_score(asked: Sequence[Question], rule: ScoringRule = brier_score) -> float:
    """What a forecaster earns on average who knows each urn: no other can expect more."""
    return sum(expected_score(rule, each.probability, each.probability) for each in asked) / len(asked)


def as_sentence(question: Question) -> str:
    return (
        f"An urn has {question.red} red balls and {BALLS - question.red} blue ones. One is drawn. How probable is it "
        "that it is red? Answer with a percentage, as 35%."
    )


def as_tokens(question: Question) -> list[int]:
    return [QUESTION_TOKEN, SMALLEST_NUMBER_TOKEN + question.red]


def probability_of_text(answer: str) -> float | None:
    """The last percentage of the answer, None without one from 0 to 100."""
    found = [float(number) for number in PERCENT.findall(answer)]
    return found[-1] / 100 if found and found[-1] <= 100 else None


def probability_of_token(answer: Sequence[int]) -> float | None:
    """In quarters. None for an empty answer."""
    return FORECASTS_IN_TOKENS[answer[0] % len(FORECASTS_IN_TOKENS)] if answer else None


@dataclass(frozen=True, slots=True)
class _Score:
    rule: ScoringRule
    read: Callable[..., float | None]

    def __call__(self, question: Question, answer: object) -> tuple[float, dict[str, float]]:
        forecast = self.read(answer)
        if forecast is None:  # it must never pay to say nothing
            return worst_score(self.rule), {"forecasts": 0.0}
        error = abs(forecast - question.probability)
        return self.rule(forecast, question.happened), {"forecasts": 1.0, "forecast_error": error}
