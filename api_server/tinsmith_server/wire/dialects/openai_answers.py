"""What OpenAI's calls answer: whole, or in the chunks of a stream."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tinsmith_rpc import wire_pb2, worker_pb2

from tinsmith_server.wire.dialects.texts import Message, Usage

Answer = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Head:
    """What all chunks of an answer begin with. `prefix` is that of its id."""

    model: str
    prefix: str
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def answer(self, kind: str, choices: list[Answer], usage: Usage | None = None) -> Answer:
        head = {"id": f"{self.prefix}-{self.id}", "object": kind, "created": self.created, "model": self.model}
        return {**head, "choices": choices, **({} if usage is None else {"usage": usage_of(usage)})}


def usage_of(usage: Usage) -> Answer:
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.sampled,
        "total_tokens": usage.prompt + usage.sampled,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
    }


def model_list(models: Iterable[tuple[str, int]]) -> Answer:
    """Of names, and when each was made, in Unix seconds."""
    return {"object": "list", "data": [model(name, created) for name, created in models]}


def model(name: str, created: int) -> Answer:
    return {"id": name, "object": "model", "created": created, "owned_by": "tinsmith"}


# ---- completions


def completion(head: Head, messages: Sequence[Message], usage: Usage) -> Answer:
    choices = []
    for index, message in enumerate(messages):
        logprobs = CompletionLogprobs().of(message.tokens) if message.tokens else None
        choices.append(_text_choice(index, message.content, logprobs, _finish(message.end)))
    return head.answer("text_completion", choices, usage)


class CompletionChunks:
    """The chunks of one stream, in the pieces' order."""

    def __init__(self, head: Head) -> None:
        self._head = head
        self._logprobs: dict[int, CompletionLogprobs] = {}

    def of(self, index: int, piece: worker_pb2.TextPiece) -> list[Answer]:
        logprobs = None
        if piece.tokens:
            logprobs = self._logprobs.setdefault(index, CompletionLogprobs()).of(piece.tokens)
        finish = _finish(piece.end) if piece.HasField("end") else None
        if not (piece.content or logprobs or finish):
            return []
        return [self._head.answer("text_completion", [_text_choice(index, piece.content, logprobs, finish)])]

    def usage(self, usage: Usage) -> Answer:
        return self._head.answer("text_completion", [], usage)


class CompletionLogprobs:
    """Of one choice. Offsets are within its text, where tokens without a text of their own are no characters wide."""

    def __init__(self) -> None:
        self._offset = 0

    def of(self, tokens: Sequence[worker_pb2.TokenText]) -> Answer:
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += token.width
        return {
            "tokens": [token.text for token in tokens],
            "token_logprobs": [token.logprob if token.HasField("logprob") else None for token in tokens],
            "top_logprobs": [_by_text(token.likeliest) if token.HasField("logprob") else None for token in tokens],
            "text_offset": offsets,
        }


def _by_text(likeliest: Iterable[worker_pb2.TokenText]) -> Mapping[str, float]:
    """Of tokens with one text the likeliest."""
    found: dict[str, float] = {}
    for one in likeliest:
        found.setdefault(one.text, one.logprob)
    return found


def _text_choice(index: int, text: str, logprobs: Answer | None, finish: str | None) -> Answer:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}


# ---- chat completions


def chat_completion(head: Head, messages: Sequence[Message], usage: Usage) -> Answer:
    choices = []
    for index, message in enumerate(messages):
        shown: Answer = {"role": "assistant", "content": message.content or (None if message.calls else "")}
        if message.reasoning:
            shown["reasoning_content"] = message.reasoning
        if message.calls:
            shown["tool_calls"] = [_call(call) for call in message.calls]
        finish = _finish(message.end, called=bool(message.calls))
        logprobs = {"content": [_scored(token) for token in message.tokens]} if message.tokens else None
        choices.append({"index": index, "message": shown, "logprobs": logprobs, "finish_reason": finish})
    return head.answer("chat.completion", choices, usage)


class ChatChunks:
    """The chunks of one stream, in the pieces' order. A call comes in one: it can be read only when it is whole."""

    def __init__(self, head: Head) -> None:
        self._head = head
        self._calls: dict[int, int] = {}

    def of(self, index: int, piece: worker_pb2.TextPiece) -> list[Answer]:
        is_first = index not in self._calls
        calls = self._calls.setdefault(index, 0)
        delta: Answer = {"role": "assistant", "content": ""} if is_first else {}
        if piece.content:
            delta["content"] = piece.content
        if piece.reasoning:
            delta["reasoning_content"] = piece.reasoning
        if piece.HasField("tool_call"):
            delta["tool_calls"] = [{"index": calls, **_call(piece.tool_call)}]
            self._calls[index] = calls + 1
        finish = _finish(piece.end, called=bool(self._calls[index])) if piece.HasField("end") else None
        logprobs = {"content": [_scored(token) for token in piece.tokens]} if piece.tokens else None
        if not (delta or logprobs or finish):
            return []
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return [self._head.answer("chat.completion.chunk", [choice])]

    def usage(self, usage: Usage) -> Answer:
        return self._head.answer("chat.completion.chunk", [], usage)


def _call(call: worker_pb2.ToolCall) -> Answer:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


def _finish(end: worker_pb2.SequenceEnd, *, called: bool = False) -> str:
    if end.reason == wire_pb2.LENGTH:
        return "length"
    return "tool_calls" if called else "stop"


def _scored(token: worker_pb2.TokenText) -> Answer:
    return {**_one(token), "top_logprobs": [_one(one) for one in token.likeliest]}


def _one(token: worker_pb2.TokenText) -> Answer:
    """`bytes` None: the token holds a part of a character."""
    whole = None if "\ufffd" in token.text else list(token.text.encode())
    return {"token": token.text, "logprob": token.logprob, "bytes": whole}
