"""The environments of a run: prompts with answers in JSONL, or the user's own functions."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from tinker_cookbook.renderers import Renderer
from tinker_cookbook.rl.types import EnvGroupBuilder

from tinsmith.training.environments.functions import from_functions
from tinsmith.training.errors import BadConfig, BadData, EvaluationError
from tinsmith.training.evaluation.examples import GRADERS, Answer, Example, contains, exact, number, require_fit
from tinsmith.training.runs.config import RlConfig
from tinsmith.training.runs.data import held_out_split
from tinsmith.training.runs.json_lines import AnsweredPrompt, Located, parse_answered, read_examples

Grader: TypeAlias = Callable[[str, str], float]
"""A function that compares a sampled text with the expected answer, and returns a score."""
Groups: TypeAlias = Sequence[EnvGroupBuilder]
NAMED = tuple(grade.__name__ for grade in (exact, contains, number))
"""The graders of `tinsmith eval` that can serve as rewards.

As a reward, each grader gives the same number as in `tinsmith eval`.
"""
MOST_HELD_OUT = 0.5
"""The largest fraction of prompts that may be held out, even if `eval_groups` is larger."""


@dataclass(frozen=True, slots=True)
class Prompts:
    """The prompts of the environment `jsonl`. For every other environment, no prompts are read."""

    train: Sequence[Located[AnsweredPrompt]] = ()
    held_out: Sequence[Located[AnsweredPrompt]] = ()


def read_prompts(config: RlConfig) -> Prompts:
    """Read the prompts. Raises BadData, and BadConfig if `data` and `environment` do not match."""
    if config.environment != "jsonl":
        if config.data is not None or config.eval_data is not None:
            raise BadConfig(f"data needs environment jsonl, but environment is {config.environment}")
        return Prompts()
    if config.data is None:
        raise BadConfig("environment jsonl requires data")
    found = _read(config, config.data)
    if config.eval_data is not None:
        return Prompts(found, _read(config, config.eval_data)[: config.eval_groups])
    train, held_out = held_out_split(len(found), MOST_HELD_OUT, config.eval_groups, config.seed)
    return Prompts([found[place] for place in train], [found[place] for place in held_out])


def _read(config: RlConfig, file: Path) -> list[Located[AnsweredPrompt]]:
    found = read_examples(file, parse_answered)
    for placed in found:
        try:
            require_fit(config.grader, Example("", placed.example.answer))
        except EvaluationError as error:
            raise BadData(f"{placed.location}: {error}; grader is {config.grader}") from error
    return found


def make_groups(config: RlConfig, prompts: Prompts, renderer: Renderer | None) -> tuple[Groups, Groups]:
    """Return training groups and held-out groups. Held-out groups use other lines or another seed.

    Raises BadConfig.
    """
    if config.environment == "jsonl":
        if renderer is None:
            raise BadConfig("environment jsonl needs a renderer, but renderer is none")
        return _of_prompts(config, prompts.train, renderer), _of_prompts(config, prompts.held_out, renderer)
    train = _groups_of_function(config, renderer, config.groups, 2 * config.seed)
    if not config.eval_groups:
        return train, []
    return train, _groups_of_function(config, renderer, config.eval_groups, 2 * config.seed + 1)


def _of_prompts(config: RlConfig, prompts: Sequence[Located[AnsweredPrompt]], renderer: Renderer) -> Groups:
    grade = grader(config.grader)
    return from_functions(
        [placed.example for placed in prompts],
        _prompt,
        lambda example, answer: grade(answer, example.answer),
        group_size=config.group_size,
        renderer=renderer,
        tags=("jsonl",),
    )


def _prompt(example: AnsweredPrompt) -> Any:
    return example.prompt


def _groups_of_function(config: RlConfig, renderer: Renderer | None, count: int, seed: int) -> Groups:
    name = config.environment
    function = named_function(name, "environment", ("jsonl",))
    groups = list(function(renderer=renderer, group_size=config.group_size, count=count, seed=seed))
    if not groups or not all(isinstance(group, EnvGroupBuilder) for group in groups):
        raise BadConfig(f"environment {name} must return a list of one or more EnvGroupBuilders")
    return groups


def grader(name: str) -> Grader:
    """Return the grader with this name. Raises BadConfig."""
    if name not in NAMED:
        return named_function(name, "grader", NAMED)
    grade = GRADERS[name]
    return lambda text, answer: grade(Example("", answer), Answer(text))


def named_function(name: str, setting: str, known: Sequence[str]) -> Callable[..., Any]:
    """Import `module:function`. The module may also be in the working directory. Raises BadConfig."""
    module, colon, function = name.partition(":")
    if not colon:
        raise BadConfig(f"{setting} is {name!r}: it must be {', '.join(known)} or module:function")
    if (place := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, place)
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise BadConfig(f"{setting} is {name!r}: {error}") from error
    return found
