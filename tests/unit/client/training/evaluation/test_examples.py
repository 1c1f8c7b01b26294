"""The answers that count as correct."""

from __future__ import annotations

import pytest
from tinsmith.training.errors import EvaluationError
from tinsmith.training.evaluation.examples import GRADERS, Answer, Example, last_number, require_fit

RIGHT = {
    "exact": [("Paris", " Paris\n"), (["Paris", "paris"], "paris"), (4, "4")],
    "contains": [("Paris", "It is PARIS."), (["no", "never"], "Never!")],
    "number": [
        (42, "6 times 7 is 42."),
        ("1,234.5", "$1234.50"),
        (3, r"10 / 3, so \boxed{3} of 12"),
        (-7, "x = -7"),
        (0.5, ".5"),
        (1e6, "1,000,000"),
    ],
    "regex": [(r"^\d{4}$", "2024"), (["cat", "dogs?"], "two dogs")],
}
WRONG = {
    "exact": [("Paris", "paris"), ("4", "It is 4")],
    "contains": [("Paris", "Lyon")],
    "number": [(42, "no idea"), (42, "42 or 43"), (3, r"\boxed{x}, that is 3"), (4, "10-5")],
    "regex": [(r"^\d{4}$", "in 2024")],
}


def score(grader: str, expected: object, text: str) -> float:
    return GRADERS[grader](Example("?", expected), Answer(text))


@pytest.mark.parametrize(("grader", "expected", "text"), [(name, *pair) for name in RIGHT for pair in RIGHT[name]])
def test_it_is_right(grader: str, expected: object, text: str) -> None:
    assert score(grader, expected, text) == 1.0


@pytest.mark.parametrize(("grader", "expected", "text"), [(name, *pair) for name in WRONG for pair in WRONG[name]])
def test_it_is_wrong(grader: str, expected: object, text: str) -> None:
    assert score(grader, expected, text) == 0.0


@pytest.mark.parametrize(
    ("text", "number"), [("3-4", 4), ("a -4", -4), ("1e-3", 0.001), ("1.2.", 1.2), ("none.", None)]
)
def test_the_last_number_of_a_text(text: str, number: float | None) -> None:
    assert last_number(text) == number


@pytest.mark.parametrize(
    ("grader", "answer", "sentence"),
    [
        ("number", "seven", "is not a number"),
        ("regex", "(", "is not a valid pattern"),
        ("exact", None, "a text, a number or a list of these"),
        ("contains", [], "a text, a number or a list of these"),
        ("exact", {"a": 1}, "a text, a number or a list of these"),
    ],
)
def test_an_answer_that_no_text_can_match_is_refused_before_anything_is_sampled(
    grader: str, answer: object, sentence: str
) -> None:
    with pytest.raises(EvaluationError, match=sentence):
        require_fit(grader, Example("?", answer))
