"""The grammar of a call's arguments in Qwen3.5's format, which has one element for each parameter.

A text is written as it is, and every other value as JSON. A parser knows the end of a text by the closing tag alone, so
a text cannot be restricted further than to some fixed texts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tinsmith_trainer.errors import UserError

END = "\n</parameter>\n"
ANY_TEXT = r"/(.|\n)*\n<\/parameter>\n/"
NOTES = frozenset({"type", "title", "description", "default", "examples", "enum", "const", "deprecated"})
"""The keywords of a text that restrict it to fixed texts, or not at all."""
KNOWN = frozenset({"type", "properties", "required", "additionalProperties", "$defs", "definitions", "$schema"})
"""The keywords of all parameters together that this grammar keeps. It adds no properties."""

Write = Callable[[str], str]


def xml_parameters(name: str, schema: Mapping[str, Any], literal: Write, json_of: Write) -> Iterator[str]:
    """Yield the rules of all parameters, the rule `name` first.

    `literal` and `json_of` write a fixed text and a JSON schema as parts of a rule. Raises UserError for a schema that
    this format cannot express.
    """
    if unknown := sorted(schema.keys() - KNOWN - NOTES):
        raise UserError(f"The schema of a tool is not supported: it has {unknown[0]} in addition to its properties.")
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list):
        raise UserError("The schema of a tool is invalid: properties must be an object, and required a list.")
    if missing := sorted(set(required) - properties.keys()):
        raise UserError(f"The schema of a tool requires {missing[0]}, which is not one of its properties.")
    definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    rules = {key: f"{name}_{number}" for number, key in enumerate(properties)}
    yield f"{name}: " + (" ".join(rules[key] + ("" if key in required else "?") for key in properties) or '""')
    for key, rule in rules.items():
        yield f"{rule}: {literal(f'<parameter={key}>' + chr(10))} {rule}_value"
        yield _value(f"{rule}_value", key, properties[key], definitions, literal, json_of)


def _value(rule: str, key: str, schema: Any, definitions: Mapping[str, Any], literal: Write, json_of: Write) -> str:
    described = schema if isinstance(schema, dict) else {}
    kinds, fixed = described.get("type"), [described["const"]] if "const" in described else described.get("enum")
    if kinds == "string" or (fixed and all(isinstance(one, str) for one in fixed)):
        if unknown := sorted(described.keys() - NOTES):
            raise UserError(f"The schema of a tool is not supported: {unknown[0]} of the text {key!r}.")
        if fixed:
            return f"{rule}: " + " | ".join(literal(f"{one}{END}") for one in fixed)
        return f"{rule}[lazy]: {ANY_TEXT}"
    if not isinstance(kinds, str) or fixed:
        # The parser converts a value by its type, and would take this one for a text.
        raise UserError(
            f"The schema of a tool is not supported: {key!r} must have one type, and an enum only of texts."
        )
    return f"{rule}: {json_of(json.dumps({**described, **definitions}))} {literal(END)}"
