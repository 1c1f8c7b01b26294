"""Examples, answers, and the graders that score an answer."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tinsmith.training.errors import EvaluationError, GradeFailed

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""A text, tokens, or a conversation of messages with `role` and `content`."""
Scores = Mapping[str, float]
SCORE = "score"
"""The metric of a grader that gives a number alone."""
DEFAULT_SEED = 0
DEFAULT_MAX_TOKENS = 256
DEFAULT_CONCURRENCY = 32
"""Examples under way at a time: a server refuses floods, and the SDK waits then."""


@dataclass(frozen=True, slots=True)
class Example:
    """`answer` is what a grader compares with. `id` tells it from the others of its task; its place, if empty."""

    prompt: Prompt
    answer: Any = None
    id: str = ""
    choices: Sequence[str] = ()

    @property
    def digest(self) -> str:
        """Of its content: 64 hexadecimal digits."""
        return digest_of(asdict(self))


@dataclass(frozen=True, slots=True)
class Answer:
    """`logprob` is the sum over its tokens, in nats; None where the server gave none. `text` is empty without a
    tokenizer."""

    text: str
    tokens: Sequence[int] = ()
    stop_reason: str = ""
    logprob: float | None = None
    scores: Scores = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ExampleResult:
    """`scores` are means over its answers."""

    example: str
    scores: Scores
    answers: Sequence[Answer]


Grade = Callable[[Example, Answer], float | Scores | Awaitable[float | Scores]]


def numbered(examples: Iterable[Example]) -> tuple[Example, ...]:
    """With an id each. Raises EvaluationError where two have the same, or there are none."""
    given = [
        Example(example.prompt, example.answer, example.id or str(place), example.choices)
        for place, example in enumerate(examples)
    ]
    if not given:
        raise EvaluationError("a task without examples")
    seen: set[str] = set()
    for example in given:
        if example.id in seen:
            raise EvaluationError(f"two examples have the id {example.id}")
        seen.add(example.id)
    return tuple(given)


def scores_of(graded: Any, example: str) -> dict[str, float]:
    """Raises GradeFailed for what is neither a number nor numbers by name: NaN would spoil a mean."""
    named = graded if isinstance(graded, Mapping) else {SCORE: graded}
    try:
        scores = {str(name): float(value) for name, value in named.items()}
    except (TypeError, ValueError):
        raise GradeFailed(f"example {example}: the grader gave {graded!r}, which is no number") from None
    unfit = [name for name, value in scores.items() if not math.isfinite(value)]
    if unfit or not scores:
        raise GradeFailed(f"example {example}: the grader gave {graded!r}, which has no mean")
    return scores


def mean_scores(answers: Sequence[Answer]) -> dict[str, float]:
    """Raises GradeFailed where the answers to one example have other metrics."""
    names = answers[0].scores.keys()
    if any(answer.scores.keys() != names for answer in answers):
        raise GradeFailed("a grader gave other metrics for one answer than for the next")
    return {name: math.fsum(answer.scores[name] for answer in answers) / len(answers) for name in names}


def seed_for(seed: int, example: Example) -> int:
    """Of its own for each example, and the same at every checkpoint: differences between those are theirs."""
    return int(digest_of([seed, example.id])[:7], 16)


def digest_of(content: Any) -> str:
    """Of anything that JSON can hold, or `str`; the order of keys does not count."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


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
    text = answer.text.casefold()
    return float(any(expected.casefold() in text for expected in expected_texts(example)))


def number(example: Example, answer: Answer) -> float:
    """1 where the last number of the text is an expected one: that of the last `\\boxed{}`, if there is any.

    Within 1e-6 of its size; commas between thousands are none of the number.
    """
    found = last_number(answer.text)
    expected = [float(text.replace(",", "")) for text in expected_texts(example)]
    if found is None:
        return 0.0
    return float(any(abs(found - value) <= RELATIVE_TOLERANCE * max(1.0, abs(value)) for value in expected))


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
    if isinstance(answer, Sequence) and answer and all(isinstance(item, str | int | float) for item in answer):
        return [str(item) for item in answer]
    raise EvaluationError(f"`answer` is to be a text, a number or a list of them, and is {answer!r}")


def last_number(text: str) -> float | None:
    boxed = BOXED.findall(text)
    found = NUMBER.findall(boxed[-1] if boxed else text)
    return float(found[-1].replace(",", "")) if found else None
