"""Conversations become tokens by the model's own files."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.first_token import FIRST, tokenizer_with_first_token
from tinsmith_rpc import worker_pb2
from tinsmith_trainer.errors import UserError
from tinsmith_trainer.sampling import model_language as language_module
from tinsmith_trainer.sampling.model_language import ModelLanguage
from tinsmith_trainer.torch_model.loading import TorchModel

HELLO = {"role": "user", "content": "Hello"}


@pytest.fixture
def language(model: TorchModel) -> ModelLanguage:
    return ModelLanguage(model.tokenizer, model.eos_token_ids, model.directory, model.info.max_sequence_length)


def rendered(language: ModelLanguage, *messages: Any, **others: Any) -> str:
    request = worker_pb2.RenderPromptRequest(conversation=json.dumps(messages), **others)
    text: str = language.tokenizer.decode(language.render(request), skip_special_tokens=False)
    return text


@pytest.mark.parametrize("text", ["hi", f"{FIRST}hi"], ids=["as it is", "from a chat template"])
def test_a_text_begins_with_the_first_token_once(language: ModelLanguage, text: str) -> None:
    asked = worker_pb2.RenderPromptRequest(text=text)
    assert replace(language, tokenizer=tokenizer_with_first_token()).render(asked) == [0, 1, 2]


@pytest.mark.parametrize(
    "template",
    [
        "{% for c in messages[-1].tool_calls %}{{ c.function.arguments | tojson }}{% endfor %}",
        "{% for c in messages[-1].tool_calls %}{{ '' + c.function.arguments }}{% endfor %}",
    ],
    ids=["an object", "a text"],
)
def test_the_arguments_of_a_call_reach_a_template_in_the_form_that_it_takes(
    language: ModelLanguage, monkeypatch: pytest.MonkeyPatch, template: str
) -> None:
    monkeypatch.setattr(language.tokenizer, "chat_template", template)
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    assert rendered(language, HELLO, {"role": "assistant", "content": "", "tool_calls": [call]}) == '{"a": 1}'


@pytest.mark.parametrize(
    ("messages", "variables", "words"),
    [
        ([{"role": "tool"}], {}, "refused the conversation"),
        ([HELLO], {"chat_template": "{{ 1 }}"}, "chat_template cannot be set"),
        ([HELLO], {"tokenize": False}, "tokenize cannot be set"),
    ],
    ids=["no content", "template", "option"],
)
def test_a_conversation_that_the_template_rejects_is_refused_with_a_message(
    language: ModelLanguage, messages: list[Any], variables: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        rendered(language, *messages, variables=json.dumps(variables))


def test_a_model_without_a_chat_template_takes_texts_alone(
    language: ModelLanguage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(language.tokenizer, "chat_template", None)
    with pytest.raises(UserError, match="no chat template"):
        rendered(language, HELLO)
    assert language.render(worker_pb2.RenderPromptRequest(text="Hello"))


def test_transformers_knows_how_answers_of_these_families_are_read() -> None:
    """The names are private, so another release may move them."""
    families = ["qwen2", "qwen3", "qwen3_moe", "qwen3_5", "gemma4"]
    assert all(language_module._known_template(family) for family in families)
    assert language_module._known_template("llama") is None


def test_on_a_transformers_without_a_parser_answers_are_content_as_they_were_written(
    language: ModelLanguage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transformers before 5.13 has none, whatever the model's files say."""
    monkeypatch.setattr(language.tokenizer, "response_template", {"fields": {}}, raising=False)
    monkeypatch.setitem(sys.modules, language_module.RESPONSE_PARSER, None)
    assert language.message_parser(np.array([1], np.int32), "[]") is None


def test_a_transformers_without_a_table_reads_only_formats_that_the_model_files_describe(
    language: ModelLanguage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Versions 5.13 and 5.14 are such; without a description in the model's files answers are returned verbatim."""
    from transformers.cli.serving import utils

    monkeypatch.delattr(utils, "_RESPONSE_TEMPLATE_FALLBACKS")
    assert language_module._known_template("qwen3") is None
    own = {"start_anchor": "x", "fields": {"content": {}}}
    monkeypatch.setattr(language.tokenizer, "response_template", own, raising=False)
    assert language.response_template == own


def test_the_response_template_of_the_model_files_takes_precedence(
    language: ModelLanguage, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = {"start_anchor": "x", "fields": {"content": {}}}
    monkeypatch.setattr(language.tokenizer, "response_template", own, raising=False)
    assert language.response_template == own


def test_a_prompt_that_is_far_too_long_is_refused_before_it_is_made_into_tokens(model: TorchModel) -> None:
    language = ModelLanguage(None, (), model.directory, context_tokens=4)
    for text, words in (("x" * 129, "has 129 characters"), ("x" * 200, "at most 32 characters")):
        with pytest.raises(UserError, match=words):
            language.render(worker_pb2.RenderPromptRequest(text=text))


def test_a_conversation_has_the_tokens_that_the_tokenizer_itself_makes_of_it(language: ModelLanguage) -> None:
    request = worker_pb2.RenderPromptRequest(conversation=json.dumps([HELLO]))
    itself = language.tokenizer.apply_chat_template([HELLO], add_generation_prompt=True, return_dict=False)
    assert language.render(request) == itself
