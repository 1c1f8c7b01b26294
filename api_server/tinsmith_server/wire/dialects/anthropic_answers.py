"""What Anthropic's calls answer: whole, or as the events of a stream."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any, Literal

import orjson
from tinsmith_rpc import wire_pb2, worker_pb2

from tinsmith_server.wire.dialects.texts import Message, Usage

Answer = dict[str, Any]
TextKind = Literal["thinking", "text"]


def message(model: str, found: Message, usage: Usage) -> Answer:
    content: list[Answer] = []
    if found.reasoning:
        content.append({"type": "thinking", "thinking": found.reasoning, "signature": ""})
    if found.content or not found.calls:
        content.append({"type": "text", "text": found.content})
    content += [_tool_use(call) for call in found.calls]
    ends = _end(found.end, called=bool(found.calls))
    return {**_head(model), "content": content, **ends, "usage": usage_of(usage)}


class MessageEvents:
    """The events of one stream. Blocks follow each other: a text that begins ends what was before it."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._end: Answer = {}
        self._index = -1
        self._open: TextKind | None = None
        self._called = False

    def begin(self, usage: Usage) -> Answer:
        head = {**_head(self._model), "content": [], "stop_reason": None, "stop_sequence": None}
        return {"type": "message_start", "message": {**head, "usage": usage_of(usage)}}

    def of(self, piece: worker_pb2.TextPiece) -> Iterator[Answer]:
        if piece.reasoning:
            yield from self._text("thinking", "thinking_delta", piece.reasoning)
        if piece.content:
            yield from self._text("text", "text_delta", piece.content)
        if piece.HasField("tool_call"):
            yield from self._call(piece.tool_call)
        if piece.HasField("end"):
            yield from self._closed()
            self._end = _end(piece.end, called=self._called)

    def end(self, usage: Usage) -> Iterator[Answer]:
        """Behind the last piece."""
        yield {"type": "message_delta", "delta": self._end, "usage": usage_of(usage)}
        yield {"type": "message_stop"}

    def _text(self, kind: TextKind, delta: str, text: str) -> Iterator[Answer]:
        if self._open != kind:
            yield from self._closed()
            block = {"type": kind, kind: "", **({"signature": ""} if kind == "thinking" else {})}
            yield self._begun(block)
            self._open = kind
        yield self._delta({"type": delta, kind: text})

    def _call(self, call: worker_pb2.ToolCall) -> Iterator[Answer]:
        yield from self._closed()
        yield self._begun({**_tool_use(call), "input": {}})
        yield self._delta({"type": "input_json_delta", "partial_json": call.arguments})
        yield {"type": "content_block_stop", "index": self._index}
        self._called = True

    def _begun(self, block: Answer) -> Answer:
        self._index += 1
        return {"type": "content_block_start", "index": self._index, "content_block": block}

    def _delta(self, delta: Answer) -> Answer:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    def _closed(self) -> Iterator[Answer]:
        if self._open is not None:
            yield {"type": "content_block_stop", "index": self._index}
        self._open = None


def usage_of(usage: Usage) -> Answer:
    """Tokens from a cache are counted apart, not among the others."""
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_read_input_tokens": usage.cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.sampled,
    }


def _head(model: str) -> Answer:
    return {"id": f"msg_{uuid.uuid4().hex[:24]}", "type": "message", "role": "assistant", "model": model}


def _tool_use(call: worker_pb2.ToolCall) -> Answer:
    identity = f"toolu_{uuid.uuid4().hex[:24]}"
    return {"type": "tool_use", "id": identity, "name": call.name, "input": _object(call.arguments)}


def _object(text: str) -> Any:
    """A dialect of objects: what a model wrote as anything else is in one."""
    content = orjson.loads(text)
    return content if isinstance(content, dict) else {"arguments": content}


def _end(end: worker_pb2.SequenceEnd, *, called: bool) -> Answer:
    if end.reason == wire_pb2.LENGTH:
        reason = "max_tokens"
    elif end.stop_string:
        reason = "stop_sequence"
    else:
        reason = "tool_use" if called else "end_turn"
    return {"stop_reason": reason, "stop_sequence": end.stop_string or None}
