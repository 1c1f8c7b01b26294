"""Assistants' messages apart, whatever pieces they come in."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tinsmith_trainer.sampling.language import Delta
from tinsmith_trainer.sampling.model_language import MessageParser, _known_template

TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}},
    }
]
TURN = "<|im_start|>assistant\n"
HERMES_CALL = '<tool_call>\n{"name": "add", "arguments": {"a": "7", "b": "7"}}\n</tool_call>'
XML_CALL = (
    "<tool_call>\n<function=add>\n<parameter=a>\n7\n</parameter>\n"
    "<parameter=b>\n7\n</parameter>\n</function>\n</tool_call>"
)
GEMMA_CALL = '<|tool_call>call:add{a:7,b:<|"|>7<|"|>}<tool_call|>'


def parsed(family: str, prefix: str, pieces: Any) -> dict[str, Any]:
    template = _known_template(family)
    assert template is not None
    parser = MessageParser(template, prefix, TOOLS)
    deltas = [delta for piece in pieces for delta in parser.feed(piece)] + parser.finish()
    return {
        "reasoning": "".join(delta.reasoning for delta in deltas),
        "content": "".join(delta.content for delta in deltas),
        "calls": [(delta.name, json.loads(delta.arguments)) for delta in deltas if delta.name],
    }


@pytest.mark.parametrize(
    ("family", "prefix", "text"),
    [
        ("qwen3", TURN, f"<think>\nTwo and\n two.\n</think>\n\nI add.\n{HERMES_CALL}\n{HERMES_CALL}<|im_end|>"),
        ("qwen2", TURN + "<think>\n", f"Two and\n two.</think>I add.\n{HERMES_CALL}\n{HERMES_CALL}<|im_end|>"),
        ("qwen3_5", TURN + "<think>\n", f"Two and\n two.\n</think>\n\nI add.\n\n{XML_CALL}\n{XML_CALL}<|im_end|>"),
        (
            "gemma4",
            "<|turn>model\n",
            f"<|channel>thought\nTwo and\n two.<channel|>I add.{GEMMA_CALL}{GEMMA_CALL}<turn|>",
        ),
    ],
    ids=["qwen3", "begun by the prompt", "qwen3.5", "gemma4"],
)
@settings(max_examples=25)
@given(data=st.data())
def test_reasoning_content_and_calls_come_apart_in_any_pieces(
    family: str, prefix: str, text: str, data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    call = ("add", {"a": 7, "b": "7"})
    expected = {"reasoning": "Two and\n two.", "content": "I add.", "calls": [call, call]}
    assert parsed(family, prefix, pieces) == expected


@pytest.mark.parametrize(
    ("call", "shown"),
    [
        ('<tool_call>\n{"name": add}\n</tool_call> and so on', '{"name": add}\n</tool_call> and so on'),
        ('<tool_call>\n{"nothing": 1}\n</tool_call> and so on', '{"nothing": 1}'),
        ("<tool_call>[1]</tool_call> and so on", "[1]"),
        ('<tool_call>\n{"name": "add", "argum', '{"name": "add", "argum'),
    ],
    ids=["no JSON", "no name", "no object", "cut off"],
)
def test_a_call_that_cannot_be_read_is_shown_as_it_is(call: str, shown: str) -> None:
    found = parsed("qwen3", TURN, ["I add.", *(call[at : at + 3] for at in range(0, len(call), 3))])
    assert found["calls"] == []
    assert found["content"].startswith("I add.")
    assert shown in found["content"]


def test_texts_come_as_they_are_written_and_calls_when_they_are_whole() -> None:
    template = _known_template("qwen3")
    assert template is not None
    parser = MessageParser(template, TURN, TOOLS)
    assert parser.feed("Hel") == [Delta(content="Hel")]
    assert parser.feed("lo \n") == [Delta(content="lo")], "what may be the end of the text waits"
    assert parser.feed("there") == [Delta(content=" \nthere")]
    assert parser.feed('<tool_call>{"name": "add", ') == []
    assert [delta.name for delta in parser.feed('"arguments": {}}</tool_call>x')] == ["add", ""]


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ('{"a": 1}', {"a": 1}),
        (json.dumps('{"a": 1}'), {"a": 1}),
        (json.dumps("plain"), "plain"),
        (json.dumps("[1]"), "[1]"),
        ("[1]", [1]),
    ],
    ids=["object", "object as a string", "string", "list as a string", "list"],
)
def test_arguments_that_a_model_wrote_as_a_string_of_json_are_an_object(written: str, read: Any) -> None:
    call = f'<tool_call>\n{{"name": "add", "arguments": {written}}}\n</tool_call><|im_end|>'
    assert parsed("qwen3", TURN, [call])["calls"] == [("add", read)]
