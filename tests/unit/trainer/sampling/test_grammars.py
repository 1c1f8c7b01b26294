"""Grammars allow the texts of their constraints, and refuse what they cannot express."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tinsmith_trainer.errors import UserError
from tinsmith_trainer.sampling.constraints.constraint import Constraint, JsonText, RegexText, TaggedTexts
from tinsmith_trainer.sampling.constraints.grammars import Grammars
from tinsmith_trainer.sampling.constraints.tool_formats import call_tags
from tinsmith_trainer.sampling.language import Tag
from tinsmith_trainer.sampling.model_language import MessageParser, ModelLanguage, _known_template
from tinsmith_trainer.torch_model.loading import TorchModel


@pytest.fixture(scope="module")
def language(model: TorchModel) -> ModelLanguage:
    return ModelLanguage(model.tokenizer, model.eos_token_ids, model.directory, model.info.max_sequence_length)


@pytest.fixture(scope="module")
def grammars(language: ModelLanguage, model: TorchModel) -> Grammars:
    return Grammars(language, model.info.vocab_size)


def fits(grammars: Grammars, language: ModelLanguage, constraint: Constraint, text: str) -> bool:
    """Return whether the text is allowed token by token, and may then end."""
    state = grammars.compiled(constraint).begin()
    tokens = language.tokenizer(text, add_special_tokens=False)["input_ids"]
    for place, token in enumerate([*tokens, language.eos_token_ids[0]], 1):
        if not state.allowed().view(np.uint32)[token // 32] >> (token % 32) & 1:
            return False
        if state.take(token):
            return place >= len(tokens)
    return False


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 9}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
CALL = Tag('<tool_call>\n{"name": "add", "arguments": ', json.dumps(PERSON), "}\n</tool_call>")
ADA = '{"name": "Ada", "age": 7}'
CALLED = f'<tool_call>\n{{"name": "add", "arguments": {ADA}}}\n</tool_call>'


XML_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "description": "any text"},
        "age": {"type": "integer"},
        "ok": {"type": "boolean"},
        "colour": {"enum": ["red", "blue"]},
    },
    "required": ["name", "age", "colour"],
}
XML_CALL = Tag("<tool_call>\n<function=add>\n", json.dumps(XML_SCHEMA), "</function>\n</tool_call>", "xml")
XML = (
    "<tool_call>\n<function=add>\n<parameter=name>\nAda <b>\n& {x}\n</parameter>\n<parameter=age>\n7\n</parameter>\n"
    "<parameter=ok>\ntrue\n</parameter>\n<parameter=colour>\nblue\n</parameter>\n</function>\n</tool_call>"
)


@pytest.mark.parametrize(
    ("constraint", "text", "is_fit"),
    [
        (JsonText(json.dumps(PERSON)), ADA, True),
        (JsonText(json.dumps(PERSON)), ADA.replace(" ", ""), False),
        (JsonText(json.dumps(PERSON)), '{"name": "Grüße 漢", "age": 7}', True),
        (JsonText(json.dumps(PERSON)), '{"name": "Ada", "age": -7}', False),
        (JsonText(json.dumps(PERSON)), '{"age": 7}', False),
        (JsonText(json.dumps(PERSON)), f"{ADA} x", False),
        (JsonText('{"type": "object"}'), '{"any": [1, {"thing": null}]}', True),
        (JsonText('{"type": "object"}'), "[1]", False),
        (RegexText(r"a/[0-9]+\/b"), "a/12/b", True),
        (RegexText("a|b"), "c", False),
        (TaggedTexts((CALL,), single=True), CALLED, True),
        (TaggedTexts((CALL,), single=True), f"{CALLED}\n{CALLED}", False),
        (TaggedTexts((CALL,), single=False), f"{CALLED}\n{CALLED}", True),
        (TaggedTexts((CALL,), single=False), "I add.", False),
        (TaggedTexts((XML_CALL,), single=True), XML, True),
        (TaggedTexts((XML_CALL,), single=True), XML.replace("<parameter=ok>\ntrue\n</parameter>\n", ""), True),
        (TaggedTexts((XML_CALL,), single=True), XML.replace("true", "yes"), False),
        (TaggedTexts((XML_CALL,), single=True), XML.replace("blue", "green"), False),
        (TaggedTexts((XML_CALL,), single=True), XML.replace("age", "years"), False),
    ],
)
def test_a_grammar_allows_the_texts_of_its_constraint(
    grammars: Grammars, language: ModelLanguage, constraint: Any, text: str, is_fit: bool
) -> None:
    assert fits(grammars, language, Constraint(constraint), text) == is_fit
    with_calls = Constraint(constraint, calls=TaggedTexts((CALL,), single=False))
    assert fits(grammars, language, with_calls, text) == (is_fit or text.startswith(CALLED))
    after_reasoning = Constraint(constraint, reasoning_end="</think>")
    assert fits(grammars, language, after_reasoning, f"Hm {{}}.\n</think>\n\n{text}") == is_fit


def walked(grammars: Grammars, language: ModelLanguage, text: Any, seed: int) -> str:
    """Return the text of random allowed tokens."""
    state = grammars.compiled(Constraint(text)).begin()
    draw, drawn = np.random.default_rng(seed), list[int]()
    while True:
        bits = np.unpackbits(state.allowed().view(np.uint8), bitorder="little")
        drawn.append(int(draw.choice(np.flatnonzero(bits))))
        if state.take(drawn[-1]):
            decoded: str = language.tokenizer.decode(drawn)
            return decoded.removesuffix(language.tokenizer.eos_token)


@settings(max_examples=20)
@given(seed=st.integers(0, 2**32))
def test_any_allowed_tokens_make_a_text_that_fits(grammars: Grammars, language: ModelLanguage, seed: int) -> None:
    read = json.loads(walked(grammars, language, JsonText(json.dumps(PERSON)), seed))
    assert sorted(read) == ["age", "name"]
    assert len(read["name"]) <= 9
    assert read["age"] >= 0


@settings(max_examples=10)
@given(seed=st.integers(0, 2**32))
def test_any_allowed_tokens_make_a_call_that_the_parser_of_qwen_3_5_reads(
    grammars: Grammars, language: ModelLanguage, seed: int
) -> None:
    template = _known_template("qwen3_5")
    assert template is not None
    properties = {name: kind for name, kind in XML_SCHEMA["properties"].items() if name != "name"}
    schema = {"type": "object", "properties": properties, "required": ["age", "colour"]}
    tool = {"type": "function", "function": {"name": "add", "parameters": schema}}
    (tag,) = call_tags(template, [tool], "")
    parser = MessageParser(template, "<|im_start|>assistant\n", [tool])
    text = walked(grammars, language, TaggedTexts((tag,), single=True), seed)
    (call,) = parser.feed(text) + parser.finish()
    read = json.loads(call.arguments)
    assert (call.name, type(read["age"]), read.pop("colour") in ("red", "blue")) == ("add", int, True)
    assert read.keys() - {"age"} <= {"ok"}
    assert isinstance(read.get("ok", True), bool)


def test_a_sequence_with_slow_masks_fails(
    grammars: Grammars, language: ModelLanguage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.thread_time", itertools.count(step=0.15).__next__)
    state = grammars.compiled(Constraint(RegexText("a*"))).begin()
    (token,) = language.tokenizer("a", add_special_tokens=False)["input_ids"]
    for _ in range(6):
        state.allowed()
        state.take(token)
    with pytest.raises(UserError, match="too slow"):
        state.allowed()


LONG_TEXT = '{"properties": {"a": {"type": "string", "minLength": 5}}}'


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (JsonText('{"type": "object", "unevaluatedProperties": false}'), "unevaluatedProperties"),
        (JsonText('{"type": "object", "if": {}, "then": {}}'), "if"),
        (JsonText('{"type": "wrong"}'), "wrong"),
        (JsonText('{"$ref": "https://x.example/schema"}'), "x.example"),
        (JsonText('{"type": "string", "pattern": "("}'), "unclosed group"),
        (RegexText("("), "regular expression is not supported: .*unclosed group"),
        (TaggedTexts((replace(CALL, schema='{"not": {}}'),), single=True), "not"),
        (TaggedTexts((replace(XML_CALL, schema='{"anyOf": []}'),), single=True), "anyOf"),
        (TaggedTexts((replace(XML_CALL, schema='{"required": ["a"]}'),), single=True), "requires a"),
        (TaggedTexts((replace(XML_CALL, schema=LONG_TEXT),), single=True), "minLength of the text 'a'"),
        (TaggedTexts((replace(XML_CALL, schema='{"properties": {"a": {}}}'),), single=True), "'a' must have one type"),
    ],
)
def test_an_unsupported_constraint_is_refused_with_the_keyword(grammars: Grammars, text: Any, words: str) -> None:
    with pytest.raises(UserError, match=words) as refused:
        grammars.compiled(Constraint(text))
    assert "\n" not in str(refused.value)
