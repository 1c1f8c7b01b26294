"""The constraint of a sequence: which texts may be drawn. Each kind of sampler compiles the constraint for itself."""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tinsmith_rpc import worker_pb2

from tinsmith_trainer.errors import UserError
from tinsmith_trainer.sampling.language import Language, Tag

ANY_OBJECT = '{"type": "object"}'
LONGEST_CONSTRAINT = 1 << 20
"""The limit on the characters of a schema or a regular expression. A schema of this length compiles in a second."""


@dataclass(frozen=True, slots=True)
class JsonText:
    """JSON that fits a schema. The schema is a JSON text."""

    schema: str


@dataclass(frozen=True, slots=True)
class RegexText:
    """A text that fits a regular expression as a whole."""

    regex: str


@dataclass(frozen=True, slots=True)
class TaggedTexts:
    """One or more tagged values, separated by line ends. With `single`, one value."""

    tags: tuple[Tag, ...]
    single: bool


@dataclass(frozen=True, slots=True)
class Constraint:
    """The texts that a sequence may have. With `calls`, the text may also be tool calls.

    If the prompt ends within reasoning, `reasoning_end` is the text that ends the reasoning: the constraint holds for
    the text after it. Otherwise `reasoning_end` is empty.
    """

    text: JsonText | RegexText | TaggedTexts
    reasoning_end: str = ""
    calls: TaggedTexts | None = None


def decode_constraint(
    request: worker_pb2.SampleRequest, language: Language | None, prompt: NDArray[np.int32]
) -> Constraint:
    """Decode the constraint of a request.

    Raises UserError if the constraint is invalid, or if the sampler does not know the model's language.
    """
    if language is None:
        raise UserError("This sampler knows tokens alone, so a text cannot be forced. Send no constraint.")
    asked, reading = request.constraint, request.reading
    text: JsonText | RegexText | TaggedTexts
    match asked.WhichOneof("kind"):
        case "json_schema":
            text = JsonText(_checked_schema(asked.json_schema))
        case "json_object":
            text = JsonText(ANY_OBJECT)
        case "regex":
            text = RegexText(_short_enough("regex", asked.regex))
        case "tool_calls":
            text = _calls(asked.tool_calls, reading, language)
        case _:
            raise UserError("The constraint is empty. Send a schema, a regular expression or tools.")
    calls = _calls(asked.or_tool_calls, reading, language) if asked.HasField("or_tool_calls") else None
    return Constraint(text, language.reasoning_end(prompt) if reading.chat else "", calls)


def _calls(asked: worker_pb2.ToolCalls, reading: worker_pb2.Reading, language: Language) -> TaggedTexts:
    return TaggedTexts(language.call_tags(_short_enough("tools", reading.tools), asked.name), asked.single)


def _checked_schema(schema: str) -> str:
    try:
        content = json.loads(_short_enough("json_schema", schema))
    except ValueError as error:
        raise UserError(f"json_schema is no JSON: {error}.") from error
    if not isinstance(content, dict):
        raise UserError("json_schema must be a JSON object.")
    return schema


def _short_enough(name: str, text: str) -> str:
    if len(text) > LONGEST_CONSTRAINT:
        raise UserError(f"{name} has {len(text)} characters; at most {LONGEST_CONSTRAINT} are compiled. Shorten it.")
    return text
