"""Pieces of text in the words of both dialects: what is streamed is what is answered whole."""

from __future__ import annotations

import json
from typing import Any

import anthropic.types
import openai.types
import openai.types.chat
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tinsmith_rpc import wire_pb2, worker_pb2
from tinsmith_server.wire.dialects import anthropic as anthropic_wire
from tinsmith_server.wire.dialects import openai as openai_wire
from tinsmith_server.wire.dialects.texts import Message, TokenUsage

USAGE = TokenUsage(prompt=7, sampled=5, cached=2)
CALL = worker_pb2.ToolCall(name="add", arguments='{"a": 1}')
END = worker_pb2.SequenceEnd(tokens=5)
PIECES = [
    worker_pb2.TextPiece(reasoning="Hm"),
    worker_pb2.TextPiece(reasoning=", so"),
    worker_pb2.TextPiece(content="I "),
    worker_pb2.TextPiece(content="add"),
    worker_pb2.TextPiece(tool_call=CALL),
    worker_pb2.TextPiece(tool_call=CALL),
    worker_pb2.TextPiece(end=END),
]


def whole(pieces: list[worker_pb2.TextPiece]) -> Message:
    message = Message()
    for piece in pieces:
        message.add(piece)
    return message


def ended(reason: wire_pb2.StopReason = wire_pb2.STOP, stop: str = "", *, calls: bool = False) -> Message:
    end = worker_pb2.TextPiece(end=worker_pb2.SequenceEnd(reason=reason, stop_string=stop))
    return whole([*([worker_pb2.TextPiece(tool_call=CALL)] if calls else []), end])


def test_a_chat_completion_is_one_to_openais_client_and_its_chunks_add_up_to_it() -> None:
    head = openai_wire.AnswerHead("m", "chatcmpl")
    answer = openai.types.chat.ChatCompletion.model_validate(openai_wire.chat_completion(head, [whole(PIECES)], USAGE))
    message: Any = answer.choices[0].message
    assert (message.content, message.reasoning_content, answer.choices[0].finish_reason) == (
        "I add",
        "Hm, so",
        "tool_calls",
    )
    chunks = openai_wire.ChatChunks(head)
    sent = [chunk for piece in PIECES for chunk in chunks.of(0, piece)] + [chunks.usage(USAGE)]
    parsed = [openai.types.chat.ChatCompletionChunk.model_validate(chunk) for chunk in sent]
    deltas: list[Any] = [chunk.choices[0].delta for chunk in parsed[:-1]]
    assert "".join(delta.content or "" for delta in deltas) == "I add"
    assert [call.index for delta in deltas for call in delta.tool_calls or ()] == [0, 1]
    assert [delta.role for delta in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
    assert parsed[-2].choices[0].finish_reason == "tool_calls"
    assert parsed[-1].usage == answer.usage


def test_a_message_is_one_to_anthropics_client_and_its_events_add_up_to_it() -> None:
    answer = anthropic.types.Message.model_validate(anthropic_wire.message("m", whole(PIECES), USAGE))
    assert [block.type for block in answer.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert (answer.stop_reason, answer.usage.input_tokens, answer.usage.cache_read_input_tokens) == ("tool_use", 5, 2)
    events = anthropic_wire.MessageEvents("m")
    sent = [events.begin(TokenUsage(7)), *(event for piece in PIECES for event in events.of(piece)), *events.end(USAGE)]
    kinds = [event["type"].removeprefix("content_block_") for event in sent]
    blocks = ["start", "delta", "delta", "stop"] * 2 + ["start", "delta", "stop"] * 2
    assert kinds == ["message_start", *blocks, "message_delta", "message_stop"]
    assert [event["index"] for event in sent if event["type"] == "content_block_start"] == [0, 1, 2, 3]


pieces = st.lists(
    st.one_of(
        st.builds(worker_pb2.TextPiece, reasoning=st.text(max_size=2)),
        st.builds(worker_pb2.TextPiece, content=st.text(max_size=2)),
        st.builds(
            lambda arguments: worker_pb2.TextPiece(tool_call=worker_pb2.ToolCall(name="add", arguments=arguments)),
            st.sampled_from(['{"a": 1}', "{}", '"{\\"a\\": 1}"', "[1]", '"x"', "null", "7"]),
        ),
    ),
    max_size=6,
)


def added_up(events: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return a message's content and end, as Anthropic's clients assemble them from its events."""
    content: list[dict[str, Any]] = []
    arguments: dict[int, str] = {}
    ends: dict[str, Any] = {}
    for event in events:
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(content)
                content.append(dict(event["content_block"]))
            case "content_block_delta" if event["delta"]["type"] == "input_json_delta":
                arguments[event["index"]] = arguments.get(event["index"], "") + event["delta"]["partial_json"]
            case "content_block_delta":
                kind = content[event["index"]]["type"]
                content[event["index"]][kind] += event["delta"][kind]
            case "message_delta":
                ends = event["delta"]
    for index, text in arguments.items():
        content[index]["input"] = json.loads(text)
    return content, ends


@given(pieces=pieces, reason=st.sampled_from([wire_pb2.STOP, wire_pb2.LENGTH]))
def test_a_streamed_message_adds_up_to_the_whole_one(
    pieces: list[worker_pb2.TextPiece], reason: wire_pb2.StopReason
) -> None:
    said = [*pieces, worker_pb2.TextPiece(end=worker_pb2.SequenceEnd(reason=reason))]
    answer = anthropic_wire.message("m", whole(said), USAGE)
    events = anthropic_wire.MessageEvents("m")
    content, ends = added_up([event for piece in said for event in events.of(piece)] + list(events.end(USAGE)))
    for one in (*content, *answer["content"]):
        one.pop("id", None)
    assert content == answer["content"]
    assert ends == {name: answer[name] for name in ends}
    assert any(block["type"] in ("text", "tool_use") for block in content)
    assert all(isinstance(block["input"], dict) for block in content if block["type"] == "tool_use")


@pytest.mark.parametrize("limit", [1, 2, 3, 20])
def test_pages_of_models_have_each_model_once_from_either_end(limit: int) -> None:
    models = [(f"org/{number}", number) for number in range(7)]
    names, after = [], None
    while True:
        page = anthropic_wire.model_page(models, limit, after, None)
        names += [one["id"] for one in page["data"]]
        after = page["last_id"]
        if not page["has_more"]:
            break
    assert names == [name for name, _ in models]
    before = anthropic_wire.model_page(models, limit, None, "org/6")
    assert [one["id"] for one in before["data"]] == names[:6][-limit:]
    assert before["has_more"] == (limit < 6)
    anthropic.types.ModelInfo.model_validate(before["data"][0])


@pytest.mark.parametrize(
    ("message", "openais", "anthropics"),
    [
        (ended(), "stop", ("end_turn", None)),
        (ended(stop="x"), "stop", ("stop_sequence", "x")),
        (ended(wire_pb2.LENGTH), "length", ("max_tokens", None)),
        (ended(calls=True), "tool_calls", ("tool_use", None)),
        (ended(wire_pb2.LENGTH, calls=True), "length", ("max_tokens", None)),
    ],
    ids=["end", "stop", "length", "call", "call at the length"],
)
def test_how_a_sequence_ended_has_a_word_in_each_dialect(
    message: Message, openais: str, anthropics: tuple[str, str | None]
) -> None:
    answer = openai_wire.chat_completion(openai_wire.AnswerHead("m", "x"), [message], USAGE)
    assert answer["choices"][0]["finish_reason"] == openais
    reply = anthropic_wire.message("m", message, USAGE)
    assert (reply["stop_reason"], reply["stop_sequence"]) == anthropics


def test_logprobs_of_a_streamed_completion_are_those_of_a_whole_one() -> None:
    texts = (("<s>", 0), ("a", 1), ("bc", 3), ("\ufffd", 0), ("\ufffd", 1))  # a space before bc, and two halves of one
    tokens = [worker_pb2.TokenText(text=text, logprob=-0.5, width=width) for text, width in texts]
    tokens[0].likeliest.extend([worker_pb2.TokenText(text="x", logprob=-0.1)] * 2)
    pieces = [worker_pb2.TextPiece(tokens=[token]) for token in tokens]
    head = openai_wire.AnswerHead("m", "cmpl")
    answer = openai_wire.completion(head, [whole(pieces)], USAGE)["choices"][0]["logprobs"]
    assert answer["tokens"] == [text for text, _ in texts]
    assert answer["text_offset"] == [0, 0, 1, 4, 4]
    chunks = openai_wire.CompletionChunks(head)
    streamed = [chunk["choices"][0]["logprobs"] for piece in pieces for chunk in chunks.of(0, piece)]
    assert {name: [value for one in streamed for value in one[name]] for name in answer} == answer
