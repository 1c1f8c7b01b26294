"""Bodies of other makers' clients become samples; unsupported fields that would change the answer are refused."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from typing import Any

import anthropic.resources
import pytest
from pydantic import ValidationError
from tinsmith_rpc import worker_pb2
from tinsmith_server.wire.dialects.anthropic import WITHOUT_EFFECT as UNREAD
from tinsmith_server.wire.dialects.anthropic import CountTokensRequest, MessagesRequest
from tinsmith_server.wire.dialects.openai import (
    WITHOUT_EFFECT,
    ChatCompletionRequest,
    CompletionRequest,
    conversation,
)
from tinsmith_server.wire.dialects.texts import NEUTRAL, Prompt
from tinsmith_server.wire.json_bodies import sentence

HELLO = [{"role": "user", "content": "Hello"}]
LIST_CALL = {"function": {"name": "add", "arguments": "[1]"}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
ADD = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}
CLAUDES_ADD = {"name": "add", "input_schema": SCHEMA}
AS_OBJECT = {"type": "json_object"}
AS_SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
FORMAT = {"type": "json_schema", "schema": SCHEMA}
NAMED = {"type": "tool", "name": "add"}


def chat(**fields: Any) -> ChatCompletionRequest:
    return ChatCompletionRequest.model_validate({"model": "m", "messages": HELLO, **fields})


def completion(**fields: Any) -> CompletionRequest:
    return CompletionRequest.model_validate({"model": "m", "prompt": "Hello", **fields})


def messages(**fields: Any) -> MessagesRequest:
    return MessagesRequest.model_validate({"model": "m", "messages": HELLO, "max_tokens": 4, **fields})


def count(**fields: Any) -> CountTokensRequest:
    return CountTokensRequest.model_validate({"model": "m", "messages": HELLO, **fields})


def rendered(prompt: Prompt) -> Any:
    assert prompt.rendered is not None
    return prompt.rendered


@pytest.mark.parametrize(
    ("make", "fields", "words"),
    [
        (chat, {"frequency_penalty": 2.5}, "frequency_penalty"),
        (chat, {"presence_penalty": -2.5}, "presence_penalty"),
        (chat, {"logit_bias": {"word": 1}}, "logit_bias"),
        (chat, {"logit_bias": {"5": 101}}, "logit_bias"),
        (chat, {"logit_bias": dict.fromkeys(map(str, range(1025)), 1)}, "at most 1024"),
        (chat, {"tool_choice": "required"}, "add tools"),
        (chat, {"tool_choice": "always", "tools": [ADD]}, "tool_choice must be"),
        (chat, {"tool_choice": {"type": "function", "function": {"name": "sub"}}, "tools": [ADD]}, "'sub'"),
        (chat, {"response_format": {"type": "xml"}}, "response_format.type"),
        (chat, {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "json_schema.schema"),
        (chat, {"response_format": AS_OBJECT, "structured_outputs": {"regex": "a"}}, "exclude each other"),
        (completion, {"structured_outputs": {"json": "{"}}, "no JSON"),
        (completion, {"structured_outputs": {"grammar": "root"}}, "structured_outputs must have"),
        (completion, {"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs must have"),
        (chat, {"top_logprobs": 2}, "needs logprobs"),
        (chat, {"top_k": 0}, "top_k"),
        (chat, {"stop": [""]}, "stop string"),
        (chat, {"stop": ["x"] * 65}, "65 stop strings"),
        (chat, {"n": 129}, "n: "),
        (chat, {"messages": []}, "messages"),
        (chat, {"messages": [{"role": "robot", "content": "x"}]}, "messages.0: role"),
        (chat, {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "only texts"),
        (chat, {"messages": [{"role": "assistant", "tool_calls": [LIST_CALL]}]}, "object"),
        (chat, {"messages": [{"role": "user", "contents": "x"}]}, "messages.0.contents is not supported"),
        (chat, {"messages": [{"role": "user", "content": "x", "prefix": True}]}, "messages.0.prefix is not supported"),
        (chat, {"messages": [{"role": "assistant", "function_call": {"name": "f"}}]}, "messages.0.function_call"),
        (chat, {"messages": [{"role": "user"}]}, "messages.0.content is missing"),
        (chat, {"messages": [*HELLO, {"role": "tool", "content": None}]}, "messages.1.content is missing"),
        (completion, {"suffix": "x"}, "suffix"),
        (completion, {"best_of": 3}, "best_of"),
        (completion, {"prompt": []}, "1 to 128 prompts"),
        (completion, {"prompt": [[5, -1]]}, "not a token id"),
        (messages, {"tool_choice": {"type": "any"}}, "add tools"),
        (messages, {"tool_choice": {"type": "must"}}, "tool_choice.type"),
        (messages, {"tool_choice": {"type": "tool", "name": "sub"}, "tools": [CLAUDES_ADD]}, "'sub'"),
        (messages, {"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        (messages, {"tools": [{"type": "bash", "name": "bash"}]}, "input_schema"),
        (messages, {"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "'document'"),
        (messages, {"max_tokens": 0}, "max_tokens"),
    ],
)  # fmt: skip
def test_an_unsupported_field_that_would_change_the_answer_is_refused_with_a_message(
    make: Any, fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValidationError) as refused:
        make(**fields)
    assert words in sentence(refused.value)


JSON = worker_pb2.Constraint(json_schema=json.dumps(SCHEMA, separators=(",", ":")))
OBJECT = worker_pb2.Constraint(json_object=worker_pb2.JsonObject())


def or_calls(constraint: worker_pb2.Constraint, *, single: bool) -> worker_pb2.Constraint:
    calls = worker_pb2.ToolCalls(single=single)
    return worker_pb2.Constraint(
        json_schema=constraint.json_schema if constraint.HasField("json_schema") else None,
        json_object=constraint.json_object if constraint.HasField("json_object") else None,
        or_tool_calls=calls,
    )


def calls(**fields: Any) -> worker_pb2.Constraint:
    return worker_pb2.Constraint(tool_calls=worker_pb2.ToolCalls(**fields))


@pytest.mark.parametrize(
    ("make", "fields", "constraint"),
    [
        (chat, {"response_format": {"type": "text"}}, None),
        (chat, {"response_format": AS_OBJECT}, OBJECT),
        (chat, {"response_format": AS_SCHEMA}, JSON),
        (chat, {"response_format": AS_OBJECT, "tools": [ADD], "tool_choice": "none"}, OBJECT),
        (chat, {"response_format": AS_OBJECT, "tools": [ADD], "tool_choice": "required"}, calls()),
        (chat, {"tools": [ADD], "tool_choice": "required", "parallel_tool_calls": False}, calls(single=True)),
        (chat, {"tools": [ADD], "tool_choice": ADD}, calls(name="add", single=True)),
        (chat, {"response_format": AS_OBJECT, "tools": [ADD]}, or_calls(OBJECT, single=False)),
        (messages, {"output_config": {"format": FORMAT}, "tools": [CLAUDES_ADD]}, or_calls(JSON, single=False)),
        (completion, {"response_format": AS_SCHEMA}, JSON),
        (completion, {"structured_outputs": {"json": SCHEMA, "regex": None}}, JSON),
        (completion, {"structured_outputs": {"json_object": True}}, OBJECT),
        (completion, {"structured_outputs": {"regex": "a+"}}, worker_pb2.Constraint(regex="a+")),
        (messages, {"output_config": {"format": FORMAT}}, JSON),
        (messages, {"tools": [CLAUDES_ADD], "tool_choice": {"type": "any"}}, calls()),
        (messages, {"tools": [CLAUDES_ADD], "tool_choice": NAMED}, calls(name="add", single=True)),
    ],
)  # fmt: skip
def test_structured_outputs_and_forced_calls_become_constraints(
    make: Any, fields: dict[str, Any], constraint: worker_pb2.Constraint | None
) -> None:
    assert make(**fields).text_request().constraint == constraint


@pytest.mark.parametrize("make", [chat, completion, messages, count])
@pytest.mark.parametrize("empty", [None, [], {}])
def test_an_empty_field_of_another_server_asks_for_nothing(make: Callable[..., Any], empty: object) -> None:
    """Programs name lists that they have gathered, whether or not there is anything in them."""
    make(mcp_servers=empty, stop_token_ids=empty)
    with pytest.raises(ValidationError, match="mcp_servers is not supported; remove it"):
        make(mcp_servers=[{"name": "docs"}])


def test_notes_of_a_client_on_an_answer_are_ignored() -> None:
    """LiteLLM adds notes of its own to each answer, which programs send again with their next turn."""
    notes = {"provider_specific_fields": {"refusal": None}, "annotations": [{"type": "x"}], "function_call": None}
    answer = {"role": "assistant", "content": "Hi!", **notes, "cache_control": {"type": "ephemeral"}}
    assert conversation([*HELLO, answer], [])[1] == {"role": "assistant", "content": "Hi!"}


@pytest.mark.parametrize(
    "field",
    [
        "seed",
        "stop",
        "logit_bias",
        "structured_outputs",
        "min_p",
        "repetition_penalty",
        "container",
        "mcp_servers",
        "output_format",
    ],
)
@pytest.mark.parametrize("make", [messages, count])
def test_a_field_of_a_message_that_would_change_its_sample_is_refused_by_name(
    make: Callable[..., Any], field: str
) -> None:
    with pytest.raises(ValidationError, match=f"{field} is not supported; remove it"):
        make(**{field: [0.5]})
    make(**{field: None})


def test_fields_of_anthropics_client_that_change_no_sample_are_taken() -> None:
    sent = {name: {"any": 1} for name in UNREAD}
    kept = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    for make in (messages, count):
        make(**sent, service_tier="auto", context_management=kept, min_p=0, repetition_penalty=1.0)
        with pytest.raises(ValidationError, match="context_management is not supported"):
            make(context_management={"edits": [{"type": "clear_tool_uses_20250919"}]})


def test_each_field_of_anthropics_client_is_read_or_ignored_or_known_to_be_refused() -> None:
    """A newer client shows here what it can send."""
    plumbing = {"self", "betas", "timeout", "extra_body", "extra_headers", "extra_query"}
    plain, beta = anthropic.resources.Messages, anthropic.resources.beta.messages.Messages
    sent = {name for client in (plain, beta) for name in inspect.signature(client.create).parameters} - plumbing
    assert sent - MessagesRequest.model_fields.keys() - UNREAD == {
        *("compaction", "container", "context_management", "fallbacks", "mcp_servers", "thread")
    }


def test_a_completion_of_no_tokens_scores_its_prompt_and_draws_nothing() -> None:
    request = completion(max_tokens=0, echo=True, logprobs=1).text_request()
    assert (request.params.max_tokens, request.echo, request.logprobs) == (0, True, 1)
    for without_echo in ({}, {"echo": False}, {"logprobs": 1}):
        with pytest.raises(ValidationError, match="max_tokens: 0 is only for"):
            completion(max_tokens=0, **without_echo)


def test_messages_become_the_form_of_chat_templates() -> None:
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    found = conversation(
        [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": parts, "name": "Ada"},
            {"role": "assistant", "content": None, "reasoning_content": "Hm", "tool_calls": [call], "refusal": None},
            {"role": "tool", "tool_call_id": "c", "content": "2"},
        ],
        [],
    )
    called = {"id": "c", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    assert found == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello", "name": "Ada"},
        {"role": "assistant", "content": "", "reasoning_content": "Hm", "tool_calls": [called]},
        {"role": "tool", "content": "2", "tool_call_id": "c"},
    ]


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_an_answer_that_comes_back_keeps_all_that_it_said(name: str) -> None:
    """`null` and empty fields come with it: clients send whole messages of other servers back."""
    empty = {"audio": None, "function_call": None, "tool_calls": [], "annotations": [{"type": "url_citation"}]}
    answer = {"role": "assistant", "content": None, "refusal": "No.", name: "Hm", **empty}
    assert conversation([answer], []) == [{"role": "assistant", "content": "No.", "reasoning_content": "Hm"}]


def test_anthropics_blocks_become_the_same() -> None:
    body = [
        {"role": "user", "content": "Hello"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm", "signature": ""},
                {"type": "text", "text": "So"},
                {"type": "tool_use", "id": "c", "name": "add", "input": {"a": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "2"}]},
                {"type": "text", "text": "And?"},
            ],
        },
    ]
    called = {"id": "c", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    assert messages(messages=body, system=[{"type": "text", "text": "Be brief."}]).conversation([]) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "So", "reasoning_content": "Hm", "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "c", "content": "2"},
        {"role": "user", "content": "And?"},
    ]


def test_tools_of_both_dialects_are_one_to_the_model() -> None:
    function = {"name": "add", "description": "Adds.", "parameters": SCHEMA}
    openai_request = chat(tools=[{"type": "function", "function": function}]).text_request()
    anthropic_request = messages(tools=[{"name": "add", "description": "Adds.", "input_schema": SCHEMA}]).text_request()
    assert (
        json.loads(openai_request.tools)
        == json.loads(anthropic_request.tools)
        == [{"type": "function", "function": function}]
    )
    assert rendered(openai_request.prompts[0]).tools == openai_request.tools


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("ab", ["ab"]), (["a", "b"], ["a", "b"]), ([5, 6], [[5, 6]]), ([[5], [6, 7]], [[5], [6, 7]])],
)
def test_a_prompt_may_be_one_or_several_texts_or_lists_of_tokens(prompt: Any, expected: list[Any]) -> None:
    found = completion(prompt=prompt).text_request()
    assert [
        one.rendered.text if one.rendered else memoryview(one.tokens).cast("i").tolist() for one in found.prompts
    ] == expected
    assert found.params.max_tokens == 16


@pytest.mark.parametrize("make", [chat, completion])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("repetition_penalty", 1.1),
        ("min_p", 0.05),
        ("min_tokens", 3),
        ("ignore_eos", True),
        ("stop_token_ids", [7]),
        ("guided_json", {"type": "object"}),
        ("prompt_logprobs", 0),
        ("chat_template", "{{ messages }}"),
        ("return_token_ids", True),
        ("temprature", 0.5),
    ],
)
def test_a_field_that_could_change_a_sample_and_is_not_known_is_refused_by_name(
    make: Callable[..., object], name: str, value: Any
) -> None:
    with pytest.raises(ValidationError) as refused:
        make(**{name: value})
    assert f"{name} is not supported; remove it" in sentence(refused.value)


@pytest.mark.parametrize("make", [chat, completion])
def test_fields_that_change_no_sample_may_be_named(make: Callable[..., object]) -> None:
    make(**dict.fromkeys(WITHOUT_EFFECT, "anything"), chat_template=None)
    for name, values in NEUTRAL.items():
        for value in values:
            make(**{name: value})


def test_a_request_that_forbids_tools_counts_and_renders_none() -> None:
    tool = {"name": "add", "description": "Adds.", "input_schema": SCHEMA}
    request = messages(tools=[tool], tool_choice={"type": "none"})
    assert request.functions() == []
    assert json.loads(request.text_request().tools or "[]") == []
