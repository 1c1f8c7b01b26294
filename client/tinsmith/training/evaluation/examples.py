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
"""A prompt: a text, tokens, or a conversation of messages with `role` and `content`."""
Scores = Mapping[str, float]
SCORE = "score"
"""The name of the metric of a grader that returns only a number."""
DEFAULT_SEED = 0
DEFAULT_MAX_TOKENS = 256
DEFAULT_CONCURRENCY = 32
"""The number of examples that are evaluated at the same time.

With a larger number, the server refuses some requests, and the SDK waits.
"""


@dataclass(frozen=True, slots=True)
class Example:
    """An example of a task. `answer` is the expected answer, for graders. `id` identifies the example within the task.

    By default, `id` is the position of the example.
    """

    prompt: Prompt
    answer: Any = None
    id: str = ""
    choices: Sequence[str] = ()

    @property
    def digest(self) -> str:
        """Return the SHA-256 of the example's content, in hexadecimal."""
        return digest_of(asdict(self))


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer to an example.

    `logprob` is the sum of the tokens' logprobs in nats, or None if the server returned no logprobs. Without a
    tokenizer, `text` is empty.
    """

    text: str
    tokens: Sequence[int] = ()
    stop_reason: str = ""
    logprob: float | None = None
    scores: Scores = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ExampleResult:
    """The result of one example. `scores` are the means over the answers to this example."""

    example: str
    scores: Scores
    answers: Sequence[Answer]


Grade = Callable[[Example, Answer], float | Scores | Awaitable[float | Scores]]


def numbered(examples: Iterable[Example]) -> tuple[Example, ...]:
    """Return the examples, with a position as `id` where an example has no ID.

    Raises EvaluationError for a repeated ID, and for an empty list of examples.
    """
    selected = [
        Example(example.prompt, example.answer, example.id or str(place), example.choices)
        for place, example in enumerate(examples)
    ]
    if not selected:
        raise EvaluationError("a task needs at least one example")
    seen: set[str] = set()
    for example in selected:
        if example.id in seen:
            raise EvaluationError(f"two examples have the id {example.id}")
        seen.add(example.id)
    return tuple(selected)


def scores_of(graded: Any, example: str) -> dict[str, float]:
    """Return the scores by name.

    Raises GradeFailed for values that are not finite numbers, because the mean would also not be finite.
    """
    named = graded if isinstance(graded, Mapping) else {SCORE: graded}
    try:
        scores = {str(name): float(value) for name, value in named.items()}
    except (TypeError, ValueError):
        raise GradeFailed(f"example {example}: the grader returned {graded!r}, which is not a number") from None
    unfit = [name for name, value in scores.items() if not math.isfinite(value)]
    if unfit or not scores:
        raise GradeFailed(f"example {example}: the grader returned {graded!r}, which is not finite")
    return scores


def mean_scores(answers: Sequence[Answer]) -> dict[str, float]:
    """Return the mean scores. Raises GradeFailed if the metrics of the answers differ."""
    names = answers[0].scores.keys()
    if any(answer.scores.keys() != names for answer in answers):
        raise GradeFailed("the grader returned different metrics for different answers")
    return {name: math.fsum(answer.scores[name] for answer in answers) / len(answers) for name in names}


def seed_for(seed: int, example: Example) -> int:
    """Return a seed for the example.

    The seed is the same at every checkpoint, so that results differ only because of the weights.
    """
    return int(digest_of([seed, example.id])[:7], 16)


def digest_of(content: Any) -> str:
    """Return a digest of a value that JSON or `str` can represent. The digest does not depend on the order of keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


CHOICE = "choice"
"""The name of the grader that compares the logprobs of choices without sampling (`ChoiceTask`)."""
NUMBER = re.compile(r"(?:(?<![\d.])[-+])?(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?")
BOXED = re.compile(r"\\boxed\{([^{}]*)\}")
RELATIVE_TOLERANCE = 1e-6


def exact(example: Example, answer: Answer) -> float:
    """Return 1 if the text equals an expected text. White space at the beginning and the end of a text is ignored."""
    return float(any(answer.text.strip() == expected.strip() for expected in expected_texts(example)))


def contains(example: Example, answer: Answer) -> float:
    """Return 1 if the text contains an expected text, ignoring case."""
    text = answer.text.casefold()
    return float(any(expected.casefold() in text for expected in expected_texts(example)))


def number(example: Example, answer: Answer) -> float:
    r"""Return 1 if an expected number is the last number in the text, or the number in the last `\boxed{}`.

    The relative tolerance is 1e-6. Commas between thousands are ignored.
    """
    found = last_number(answer.text)
    expected = [float(text.replace(",", "")) for text in expected_texts(example)]
    if found is None:
        return 0.0
    return float(any(abs(found - value) <= RELATIVE_TOLERANCE * max(1.0, abs(value)) for value in expected))


def regex(example: Example, answer: Answer) -> float:
    """Return 1 if an expected pattern of Python's `re` is found in the text."""
    return float(any(re.search(pattern, answer.text) for pattern in expected_texts(example)))


Grader = Callable[[Example, Answer], float]
GRADERS: Mapping[str, Grader] = {grader.__name__: grader for grader in (exact, contains, number, regex)}
GRADER_NAMES = (*GRADERS, CHOICE)


def require_fit(grader: str, example: Example) -> None:
    """Raise EvaluationError if the grader cannot use the answer of the example.

    The answers of all examples are checked before anything is sampled.
    """
    for text in expected_texts(example):
        if grader == number.__name__:
            try:
                float(text.replace(",", ""))
            except ValueError:
                raise EvaluationError(f"the answer {text!r} is not a number") from None
        if grader == regex.__name__:
            try:
                re.compile(text)
            except re.error as error:
                raise EvaluationError(f"the answer {text!r} is not a valid pattern: {error}") from None


def expected_texts(example: Example) -> Sequence[str]:
    """Return a list of the correct answers; an example may have several.

    Raises EvaluationError for an example without an answer.
    """
    answer = example.answer
    if isinstance(answer, str | int | float) and not isinstance(answer, bool):
        return [str(answer)]
    if isinstance(answer, Sequence) and answer and all(isinstance(item, str | int | float) for item in answer):
        return [str(item) for item in answer]
    raise EvaluationError(f"`answer` must be a text, a number or a list of these, not {answer!r}")


def last_number(text: str) -> float | None:
    boxed = BOXED.findall(text)
    found = NUMBER.findall(boxed[-1] if boxed else text)
    return float(found[-1].replace(",", "")) if found else None
