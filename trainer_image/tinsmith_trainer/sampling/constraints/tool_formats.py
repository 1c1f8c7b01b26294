"""The parts of a model's message format that constraints need: the tags of tool calls, and the end of reasoning.

The format is a response template of transformers, which describes how to parse a message. A template of another form
than those of this module is refused, because a call in a wrong format could not be parsed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tinsmith_trainer.errors import UserError
from tinsmith_trainer.sampling.language import Tag

REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
WHOLE_CALL = {"type": "function", "function": "{content}"}
"""The transformation of a call that is one JSON object with the function's name and the arguments."""
QWEN_XML = {
    "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
    "close_pattern": r"</function>\s*</tool_call>",
    "content": "xml-inline",
    "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>"},
}
"""The field of Qwen3.5's calls, which have one element for each argument."""
NO_PARAMETERS = {"type": "object", "properties": {}}
LEADING_SPACE = r"\s*"
METACHARACTERS = re.compile(r"(?<!\\)[\^$.|?*+(){}\[\]]|\\\w")


def call_tags(template: Mapping[str, Any] | None, tools: Sequence[Mapping[str, Any]], name: str) -> tuple[Tag, ...]:
    """Return a tag for each tool that may be called. If `name` is set, only this tool may be called.

    Raises UserError if no tool has this name, or if the format of the model's calls is unknown.
    """
    functions = [_function(tool) for tool in tools]
    chosen = [one for one in functions if name in ("", one["name"])]
    if not chosen:
        raise UserError(f"tool_choice names {name!r}, which is no tool of the request. Name one of its tools.")
    return tuple(_tag(template, one["name"], one.get("parameters") or NO_PARAMETERS) for one in chosen)


def reasoning_end(template: Mapping[str, Any] | None, prompt: str) -> str:
    """Return the text that ends the reasoning if the prompt ends within reasoning, otherwise an empty text."""
    anchors = (template or {}).get("start_anchor") or []
    starts = [prompt.rfind(anchor) for anchor in ([anchors] if isinstance(anchors, str) else anchors)]
    fields = (template or {}).get("fields", {})
    field = next((fields[name] for name in REASONING_FIELDS if name in fields), None)
    if field is None or max(starts, default=-1) < 0:
        return ""
    begin, end = _plain(field, "open"), _plain(field, "close")
    begun = prompt[max(starts) :]
    return end if begin and end and begun.rfind(begin) > begun.rfind(end) else ""


def _tag(template: Mapping[str, Any] | None, name: str, parameters: Mapping[str, Any]) -> Tag:
    field = (template or {}).get("fields", {}).get("tool_calls")
    if field is None:
        raise UserError(
            "No format of tool calls is known for this model, so no grammar can contain a call. Send tool_choice none, "
            "or tool_choice auto without a format."
        )
    schema = json.dumps(parameters, ensure_ascii=False)
    if all(field.get(key) == value for key, value in QWEN_XML.items()):
        return Tag(f"<tool_call>\n<function={name}>\n", schema, "</function>\n</tool_call>", "xml")
    begin, end = _plain(field, "open"), _plain(field, "close")
    is_whole = field.get("content") == "json" and "content_args" not in field and field.get("transform") == WHOLE_CALL
    if not (is_whole and begin and end):
        raise UserError(
            "This model writes tool calls in a format for which no grammar is known. Send tool_choice none, or "
            "tool_choice auto without a format."
        )
    named = json.dumps(name, ensure_ascii=False)
    return Tag(f'{begin}\n{{"name": {named}, "arguments": ', schema, f"}}\n{end}")


def _function(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise UserError("tools: each tool needs a function with a name.")
    if not isinstance(function.get("parameters") or {}, dict):
        raise UserError(f"tools: the parameters of {function['name']} must be a JSON schema.")
    return function


def _plain(field: Mapping[str, Any], side: str) -> str:
    """Return the text at one side of a field, or an empty text if the side is a true pattern."""
    text = field.get(side)
    if text is not None:
        return text if isinstance(text, str) else next(iter(text), "")
    pattern = str(field.get(f"{side}_pattern", "")).removeprefix(LEADING_SPACE)
    return "" if METACHARACTERS.search(pattern) else re.sub(r"\\(.)", r"\1", pattern)
