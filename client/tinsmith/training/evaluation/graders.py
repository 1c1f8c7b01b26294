"""The graders that files of examples name: each compares an answer's text with what its example expects."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from tinsmith.training.errors import EvaluationError
from tinsmith.training.evaluation.examples import Answer, Example

CHOICE = "choice"
"""By logprobs of the choices, without sampling: `ChoiceTask`."""
NUMBER = re.compile(r"(?:(?<![\d.])[-+])?(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?")
BOXED = re.compile(r"\\boxed\{([^{}]*)\}")
RELATIVE_TOLERANCE = 1e-6


def exact(example: Example, answer: Answer) -> float:
    """1 where the text is an expected one, but for white space around it."""
    return float(any(answer.text.strip() == expected.strip() for expected in expected_texts(example)))


def contains(example: Example, answer: Answer) -> float:
    """1 where an expected text is part of the answer's, in any case of letters."""
    said = answer.text.casefold()
    return float(any(expected.casefold() in said for expected in expected_texts(example)))


def number(example: Example, answer: Answer) -> float:
    """1 where the last number of the text is an expected one: that of the last `\\boxed{}`, if there is any.

    Within 1e-6 of its size; commas between thousands are none of the number.
    """
    said = last_number(answer.text)
    expected = [float(text.replace(",", "")) for text in expected_texts(example)]
    if said is None:
        return 0.0
    return float(any(abs(said - one) <= RELATIVE_TOLERANCE * max(1.0, abs(one)) for one in expected))


def regex(example: Example, answer: Answer) -> float:
    """1 where an expected pattern of Python's `re` is found in the text."""
    return float(any(re.search(pattern, answer.text) for pattern in expected_texts(example)))


Grader = Callable[[Example, Answer], float]
GRADERS: Mapping[str, Grader] = {grader.__name__: grader for grader in (exact, contains, number, regex)}
GRADER_NAMES = (*GRADERS, CHOICE)


def require_fit(grader: str, example: Example) -> None:
    """Raises EvaluationError for an example whose answer this grader cannot compare, before anything is sampled."""
    for text in expected_texts(example):
        if grader == number.__name__:
            try:
                float(text.replace(",", ""))
            except ValueError:
                raise EvaluationError(f"the answer {text!r} is no number") from None
        if grader == regex.__name__:
            try:
                re.compile(text)
            except re.error as error:
                raise EvaluationError(f"the answer {text!r} is no pattern: {error}") from None


def expected_texts(example: Example) -> Sequence[str]:
    """One, or several of which each is right. Raises EvaluationError for an example without."""
    answer = example.answer
    if isinstance(answer, str | int | float) and not isinstance(answer, bool):
        return [str(answer)]
    if isinstance(answer, Sequence) and answer and all(isinstance(one, str | int | float) for one in answer):
        return [str(one) for one in answer]
    raise EvaluationError(f"`answer` is to be a text, a number or a list of them, and is {answer!r}")


def last_number(text: str) -> float | None:
    boxed = BOXED.findall(text)
    found = NUMBER.findall(boxed[-1] if boxed else text)
    return float(found[-1].replace(",", "")) if found else None
