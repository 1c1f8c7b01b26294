"""The format of tool calls and reasoning, as the constraints of sequences need it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tinsmith_trainer.errors import UserError
from tinsmith_trainer.sampling.constraints.tool_formats import call_tags, reasoning_end
from tinsmith_trainer.sampling.language import Delta
from tinsmith_trainer.sampling.model_language import MessageParser, _known_template

TURN = "<|im_start|>assistant\n"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
ADD: dict[str, Any] = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}
NOW: dict[str, Any] = {"type": "function", "function": {"name": "now"}}


def test_a_forced_call_is_one_that_the_models_parser_reads() -> None:
    template = _known_template("qwen3")
    assert template is not None
    add, now = call_tags(template, [ADD, NOW], "")
    assert call_tags(template, [ADD, NOW], "now") == (now,)
    assert json.loads(add.schema) == SCHEMA
    parser = MessageParser(template, TURN, [ADD, NOW])
    text = "\n".join([f'{add.begin}{{"a": 7}}{add.end}', f"{now.begin}{{}}{now.end}"])
    assert parser.feed(text) + parser.finish() == [
        Delta(name="add", arguments='{"a": 7}'),
        Delta(name="now", arguments="{}"),
    ]


def test_a_forced_call_of_qwen_3_5_is_one_that_its_parser_reads() -> None:
    template = _known_template("qwen3_5")
    assert template is not None
    (add,) = call_tags(template, [ADD], "add")
    parser = MessageParser(template, TURN, [ADD])
    text = f"{add.begin}<parameter=a>\n7\n</parameter>\n{add.end}"
    assert (add.form, parser.feed(text) + parser.finish()) == ("xml", [Delta(name="add", arguments='{"a": 7}')])


@pytest.mark.parametrize(
    ("template", "tools", "words"),
    [
        (None, [ADD], "No format of tool calls is known"),
        (_known_template("gemma4"), [ADD], "for which no grammar is known"),
        (_known_template("qwen3"), [NOW], "'add', which is no tool"),
        (_known_template("qwen3"), [{"type": "bash"}], "needs a function with a name"),
    ],
)
def test_a_call_that_cannot_be_forced_is_refused_with_the_reason(template: Any, tools: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        call_tags(template, tools, "add")


@pytest.mark.parametrize(
    ("family", "prompt", "end"),
    [
        ("qwen3", TURN, ""),
        ("qwen3", f"{TURN}<think>\n", "</think>"),
        ("qwen3", f"{TURN}<think>\n\n</think>\n\n", ""),
        ("qwen3", f"{TURN}<think>\n<|im_end|>\n{TURN}", ""),
        ("qwen3", "<think>\n", ""),
        ("gemma4", "<|turn>model\n<|channel>thought\n", "<channel|>"),
    ],
)
def test_the_end_of_reasoning_is_known_if_the_prompt_ends_within_it(family: str, prompt: str, end: str) -> None:
    assert reasoning_end(_known_template(family), prompt) == end
    assert reasoning_end(None, prompt) == ""
