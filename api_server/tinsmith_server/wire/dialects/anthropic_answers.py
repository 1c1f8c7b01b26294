"""What Anthropic's calls answer: whole, or as the events of a stream."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, Literal

import orjson
from tinsmith_rpc import wire_pb2, worker_pb2

from tinsmith_server.errors import NotFound
from tinsmith_server.wire.dialects.texts import Message, MessagePart, Usage

Answer = dict[str, Any]
TextKind = Literal["thinking", "text"]
EMPTY: Answer = {"type": "text", "text": ""}


def message(model: str, found: Message, usage: Usage) -> Answer:
    content = [_block(part) for part in found.parts]
    if not found.content and not found.calls:
        content.append(EMPTY)
    ends = _end(found.end, called=bool(found.calls))
    return {**_head(model), "content": content, **ends, "usage": usage_of(usage)}


def _block(part: MessagePart) -> Answer:
    if part.call is not None:
        return _tool_use(part.call)
    if part.reasoning:
        return {"type": "thinking", "thinking": part.reasoning, "signature": ""}
    return {"type": "text", "text": part.content}


class MessageEvents:
    """The events of one stream, whose blocks are those of the whole answer: a text that begins ends what was before it.

    An answer without text and calls has an empty text in both: clients read the first one without looking.
    """

    def __init__(self, model: str) -> None:
        self._model = model
        self._end: Answer = {}
        self._index = -1
        self._open: TextKind | None = None
        self._called = False
        self._said = False

    def begin(self, usage: Usage) -> Answer:
        head = {**_head(self._model), "content": [], "stop_reason": None, "stop_sequence": None}
        return {"type": "message_start", "message": {**head, "usage": usage_of(usage)}}

    def of(self, piece: worker_pb2.TextPiece) -> Iterator[Answer]:
        if piece.reasoning:
            yield from self._text("thinking", "thinking_delta", piece.reasoning)
        if piece.content:
            self._said = True
            yield from self._text("text", "text_delta", piece.content)
        if piece.HasField("tool_call"):
            yield from self._call(piece.tool_call)
        if piece.HasField("end"):
            yield from self._closed()
            if not self._said and not self._called:
                yield self._begun(EMPTY)
                yield {"type": "content_block_stop", "index": self._index}
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
        block = _tool_use(call)
        yield self._begun({**block, "input": {}})
        yield self._delta({"type": "input_json_delta", "partial_json": orjson.dumps(block["input"]).decode()})
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


def model_page(models: Sequence[tuple[str, int]], limit: int, after: str | None, before: str | None) -> Answer:
    """Return one page of models, given by name and creation time in Unix seconds. Raises NotFound for a cursor."""
    names = [name for name, _ in models]
    for cursor in (after, before):
        if cursor is not None and cursor not in names:
            raise NotFound(f"there is no model {cursor[:100]!r}; give an id of the list, or no cursor")
    start = names.index(after) + 1 if after is not None else 0
    end = names.index(before) if before is not None else len(names)
    page = range(max(start, end - limit), end) if before is not None else range(start, min(end, start + limit))
    data = [model(*models[place]) for place in page]
    has_more = page.start > start if before is not None else page.stop < end
    ids = [one["id"] for one in data]
    return {
        "data": data,
        "has_more": has_more,
        "first_id": ids[0] if ids else None,
        "last_id": ids[-1] if ids else None,
    }


def model(name: str, created: int) -> Answer:
    at = datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {"type": "model", "id": name, "display_name": name, "created_at": at, "lifecycle": "active"}


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
    """Return a call's arguments as the object that this dialect has. What a model wrote as anything else is in one."""
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
