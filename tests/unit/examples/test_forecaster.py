"""The example forecaster: an honest probability earns most, and the same seed gives the same questions."""

from __future__ import annotations

import pytest
from forecaster import (
    LOG_SCORE_LIMIT,
    TOKEN_FORECASTS,
    Question,
    ScoringRule,
    as_sentence,
    best_score,
    brier_score,
    expected_score,
    forecasting,
    log_score,
    probability_of_text,
    probability_of_token,
    questions,
    worst_score,
)
from hypothesis import given
from hypothesis import strategies as st

pytestmark = pytest.mark.pytorch

PROBABILITIES = st.floats(0, 1)
SURE_ENOUGH = st.floats(1 - LOG_SCORE_LIMIT, LOG_SCORE_LIMIT)


@pytest.mark.parametrize("rule", [brier_score, log_score])
@given(probability=SURE_ENOUGH, other=PROBABILITIES)
def test_no_forecast_can_expect_more_than_the_true_probability(
    rule: ScoringRule, probability: float, other: float
) -> None:
    assert expected_score(rule, probability, probability) >= expected_score(rule, other, probability) - 1e-12


@pytest.mark.parametrize("rule", [brier_score, log_score])
@given(probability=SURE_ENOUGH, error=st.floats(0.01, 0.5))
def test_a_forecast_that_is_off_expects_less(rule: ScoringRule, probability: float, error: float) -> None:
    """The rules are strictly proper: the loss is larger than rounding errors."""
    other = probability + error if probability < 0.5 else probability - error
    assert expected_score(rule, other, probability) < expected_score(rule, probability, probability) - 1e-5


@given(forecast=PROBABILITIES, happened=st.booleans())
def test_scores_lie_between_the_worst_and_nothing(forecast: float, happened: bool) -> None:
    for rule in (brier_score, log_score):
        assert worst_score(rule) <= rule(forecast, happened) <= 0


@pytest.mark.parametrize("wrong", [-0.1, 1.1, float("nan")])
def test_an_answer_without_a_probability_has_no_score(wrong: float) -> None:
    with pytest.raises(ValueError, match="must be a probability from 0 to 1"):
        brier_score(wrong, True)


def test_questions_are_the_same_for_the_same_seed_and_outcomes_as_frequent_as_probable() -> None:
    asked = questions(3, 4000)
    assert asked == questions(3, 4000) != questions(4, 4000)
    of_three = [question.happened for question in asked if question.red == 3]
    assert sum(of_three) / len(of_three) == pytest.approx(0.3, abs=0.1)
    assert best_score(asked) == pytest.approx(-0.09, abs=0.01)


@pytest.mark.parametrize(
    ("answer", "forecast"),
    [
        ("35%", 0.35),
        ("10 %, no: 100%", 1.0),
        ("62.5%", 0.625),
        ("100.5 %", None),
        ("I do not know", None),
        ("350%", None),
        ("1005%", None),
        ("", None),
    ],
)
def test_a_percentage_is_read_from_words(answer: str, forecast: float | None) -> None:
    assert probability_of_text(answer) == forecast


def test_every_token_is_a_forecast() -> None:
    assert {probability_of_token([token]) for token in range(512)} == {*TOKEN_FORECASTS}
    assert probability_of_token([]) is None


def test_a_question_names_the_urn_and_the_form_of_its_answer() -> None:
    assert as_sentence(Question(3, True)).startswith("An urn has 3 red balls and 7 blue ones.")


def test_an_empty_answer_gets_the_worst_score() -> None:
    [group] = forecasting([Question(3, True)], group_size=2, rule=log_score)
    silent, _ = group.play.reward(group.example, [])  # type: ignore[attr-defined]
    assert silent == worst_score(log_score)
