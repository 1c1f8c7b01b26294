"""Tasks that are loaded from JSONL files of examples, or from objects in modules."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tinker import types
from tinker_cookbook.eval.evaluators import SamplingClientEvaluator

from tinsmith.files import NoJson, numbered_lines, parse_line, without_empty
from tinsmith.training.errors import EvaluationError, TaskFileError
from tinsmith.training.evaluation.examples import CHOICE, GRADER_NAMES, GRADERS, Example, exact, require_fit
from tinsmith.training.evaluation.tasks import ChoiceTask, ExampleTask, Task, right_choice

KNOWN = {"id", "prompt", "messages", "answer", "choices"}


@dataclass(frozen=True, slots=True)
class TaskOptions:
    """Options for a file of examples (see Task).

    The default of `grader` is "choice" for examples with choices, and "exact" for other examples. Only the first
    `limit` examples are used.
    """

    grader: str | None = None
    params: types.SamplingParams | None = None
    num_samples: int = 1
    limit: int | None = None
    renderer: str | None = None
    tokenizer: Any | Literal[False] | None = None


def load_task(path: str | Path, options: TaskOptions | None = None) -> ExampleTask:
    """Load a task from a file. Each line is `{"prompt" or "messages": …, "answer": …}`.

    The name of the task is the name of the file without the suffix. `prompt` is a text or tokens, `choices` are texts,
    `id` identifies an example. Raises TaskFileError with the file and the line.
    """
    path, options = Path(path), options or TaskOptions()
    examples = list(_examples(path))[: options.limit]
    grader = options.grader or (CHOICE if any(example.choices for _, example in examples) else exact.__name__)
    if grader not in GRADER_NAMES:
        raise TaskFileError(f"there is no grader {grader}; use one of {', '.join(GRADER_NAMES)}")
    for line, example in examples:
        try:
            right_choice(example) if grader == CHOICE else require_fit(grader, example)
        except EvaluationError as error:
            raise TaskFileError(f"{path}:{line}: {error}") from error
    try:
        return _task(path.stem, [example for _, example in examples], grader, options)
    except EvaluationError as error:
        raise TaskFileError(f"{path}: {error}") from error


def find_tasks(name: str, options: TaskOptions | None = None) -> list[SamplingClientEvaluator]:
    """Return the tasks in `module:name`, or in a file of examples.

    `name` is an evaluator, several evaluators, or a function that returns evaluators. The module may also be in the
    working directory. Raises TaskFileError.
    """
    if name.endswith(".jsonl") or ":" not in name:
        return [load_task(name, options)]
    module, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise TaskFileError(f"{name}: {error}") from error
    if not isinstance(found, SamplingClientEvaluator) and callable(found):
        found = found()
    several = [found] if isinstance(found, SamplingClientEvaluator) else found
    if not isinstance(several, Sequence) or not all(isinstance(task, SamplingClientEvaluator) for task in several):
        raise TaskFileError(f"{name} has type {type(found).__name__}; it must be a task or a SamplingClientEvaluator")
    return list(several)


def _task(name: str, examples: Sequence[Example], grader: str, options: TaskOptions) -> ExampleTask:
    rendered: dict[str, Any] = {"renderer": options.renderer, "tokenizer": options.tokenizer}
    if grader == CHOICE:
        return ChoiceTask(name, examples, **rendered)
    return Task(name, examples, GRADERS[grader], params=options.params, num_samples=options.num_samples, **rendered)


def _examples(path: Path) -> Iterator[tuple[int, Example]]:
    """Yield each example with its line number. Empty lines are skipped."""
    try:
        lines = numbered_lines(path)
    except (OSError, UnicodeDecodeError) as error:
        raise TaskFileError(f"{path} cannot be read: {error}") from error
    for number, line in lines:
        try:
            yield number, _example(parse_line(line))
        except (NoJson, TaskFileError) as error:
            raise TaskFileError(f"{path}:{number}: {error}") from error


def _example(row: Any) -> Example:
    if not isinstance(row, Mapping):
        raise TaskFileError("a line must be an object with prompt (or messages) and answer")
    row = without_empty(dict(row), *KNOWN)
    if unknown := sorted(row.keys() - KNOWN):
        raise TaskFileError(f"unknown key {unknown[0]}; an example may have {', '.join(sorted(KNOWN))}")
    if ("prompt" in row) == ("messages" in row):
        raise TaskFileError("an example must have either prompt or messages")
    if "answer" not in row:
        raise TaskFileError("answer is missing")
    prompt = _messages(row["messages"]) if "messages" in row else _prompt(row["prompt"])
    choices = row.get("choices", [])
    if not isinstance(choices, list) or not all(isinstance(choice, str) for choice in choices):
        raise TaskFileError("choices must be a list of texts")
    return Example(prompt, row["answer"], str(row.get("id", "")), tuple(choices))


def _prompt(prompt: Any) -> str | list[int]:
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and prompt and all(type(token) is int and token >= 0 for token in prompt):
        return prompt
    raise TaskFileError("prompt must be a text or a list of tokens; use messages for a conversation")


def _messages(messages: Any) -> list[dict[str, Any]]:
    if not isinstance(messages, list) or not messages:
        raise TaskFileError("messages must be a list of objects with role and content")
    for message in messages:
        if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
            raise TaskFileError("messages must be a list of objects with role and content")
    return messages
