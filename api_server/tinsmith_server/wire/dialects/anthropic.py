"""Anthropic's requests and answers."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

import orjson
from pydantic import ConfigDict, Field, model_validator
from tinsmith_rpc import wire_pb2, worker_pb2

from tinsmith_server.errors import NotFound
from tinsmith_server.wire.dialects.constraints import forced_calls, of_output_format
from tinsmith_server.wire.dialects.images import Content, Images, image_of_source
from tinsmith_server.wire.dialects.texts import (
    Message,
    MessagePart,
    Prompt,
    TextRequest,
    TokenUsage,
    checked_stops,
    refuse_unknown,
)
from tinsmith_server.wire.requests import Finite, NonNegative, Request, SamplingParams, Words

Messages = list[dict[str, Any]]


# Fields that clients may send and that are ignored: they change no sample.
WITHOUT_EFFECT = frozenset(
    {
        *("billing_policy", "cache_control", "diagnostics", "fallback_credit_token", "inference_geo", "metadata"),
        *("speed", "user_profile_id", "workspace_id"),
    }
)


class CountTokensRequest(Request):
    """The parts of a prompt. An unknown field is refused, unless it cannot change a sample."""

    model_config = ConfigDict(extra="allow")

    model: str
    messages: Annotated[Messages, Field(min_length=1)]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _is_a_plain_conversation(self) -> CountTokensRequest:
        self._check_unknown()
        self.conversation([])
        self.functions()
        self.constraint()
        return self

    def _check_unknown(self) -> None:
        """Refuse the same fields as the request for a message.

        So the count is correct for the prompt that would be sampled.
        """
        unknown = dict(self.model_extra or {})
        if _edits_nothing(unknown.get("context_management")):
            unknown.pop("context_management", None)
        refuse_unknown(unknown, WITHOUT_EFFECT | MessagesRequest.model_fields.keys())

    def conversation(self, images: Images) -> Messages:
        """Return the messages in the form that chat templates read. The images are added to `images`.

        Raises ValueError for content that chat templates cannot read.
        """
        found: Messages = []
        if self.system:
            found.append({"role": "system", "content": _text("system", self.system)})
        for index, message in enumerate(self.messages):
            found.extend(_messages(f"messages.{index}", message, images))
        return found

    def functions(self) -> list[dict[str, Any]]:
        """Return the tools as functions. Raises ValueError."""
        if self.tool_choice is not None and self.tool_choice.get("type") == "none":
            return []
        return [_function(f"tools.{index}", tool) for index, tool in enumerate(self.tools or ())]

    def constraint(self) -> worker_pb2.Constraint | None:
        """Return the constraint of the answer, or None. Raises ValueError."""
        found, choice = of_output_format((self.output_config or {}).get("format")), self.tool_choice or {}
        single = choice.get("disable_parallel_tool_use") is True
        match choice.get("type", "auto"):
            case "none":
                return found
            case "auto":
                if found is not None and self.tools:
                    found.or_tool_calls.single = single
                return found
            case "any" | "tool" as kind:
                names = [tool.get("name") for tool in self.tools or ()]
                name = str(choice.get("name") or "") if kind == "tool" else None
                return forced_calls(names, name, single=single or name is not None)
        raise ValueError("tool_choice.type must be auto, none, any or tool")

    def prompt(self) -> Prompt:
        """Return the prompt. If the last message is from the assistant, the answer continues this message."""
        images: Images = []
        messages, tools = self.conversation(images), self.functions()
        begun = messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls")
        rendered = worker_pb2.RenderPromptRequest(
            conversation=orjson.dumps(messages).decode(),
            tools=orjson.dumps(tools).decode() if tools else "",
            variables=orjson.dumps(self._variables()).decode(),
            continue_last=begun,
            images=len(images),
        )
        return Prompt(rendered, images=tuple(images))

    def _variables(self) -> dict[str, Any]:
        """Return the variables that tell a chat template whether to think. Other templates ignore these variables."""
        kind, effort = (self.thinking or {}).get("type"), (self.output_config or {}).get("effort")
        thinking = {} if kind is None else {"enable_thinking": kind != "disabled"}
        return thinking if effort is None else {**thinking, "reasoning_effort": effort}


class MessagesRequest(CountTokensRequest):
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)]
    stop_sequences: Words | None = None
    stream: bool | None = None
    temperature: NonNegative | None = None
    top_p: Annotated[Finite, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    service_tier: Literal["auto", "standard_only"] | None = None

    @model_validator(mode="after")
    def _stops_somewhere(self) -> MessagesRequest:
        checked_stops(self.stop_sequences)
        return self

    def text_request(self) -> TextRequest:
        prompt = self.prompt()
        assert prompt.rendered is not None
        return TextRequest(
            model=self.model,
            prompts=(prompt,),
            params=SamplingParams(
                max_tokens=self.max_tokens,
                temperature=1.0 if self.temperature is None else self.temperature,
                top_k=self.top_k or -1,
                top_p=1.0 if self.top_p is None else self.top_p,
            ),
            stops=checked_stops(self.stop_sequences),
            chat=True,
            tools=prompt.rendered.tools,
            constraint=self.constraint(),
        )


def _edits_nothing(management: Any) -> bool:
    """Return whether the requested edits leave the context unchanged.

    Claude Code requests edits that change nothing.
    """
    edits = management.get("edits") if isinstance(management, dict) else None
    return not management or (isinstance(edits, list) and all(_keeps_all(edit) for edit in edits))


def _keeps_all(edit: Any) -> bool:
    return isinstance(edit, dict) and edit.get("keep") == "all"


def _messages(where: str, message: Mapping[str, Any], images: Images) -> Iterator[dict[str, Any]]:
    """Yield the messages. Tool results become separate messages, before the rest of the message's content."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise ValueError(f"{where}: role must be user or assistant")
    if isinstance(content, str):
        yield {"role": role, "content": content}
        return
    blocks = _blocks(where, content)
    for block in blocks:
        if block["type"] == "tool_result":
            text = _text(where, block.get("content") or "")
            yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text}
    spoken = [block for block in blocks if block["type"] != "tool_result"]
    if spoken or not blocks:
        yield _message(where, role, spoken, images)


def _message(where: str, role: str, blocks: Messages, images: Images) -> dict[str, Any]:
    content, thoughts, calls = Content(images), [], []
    for block in blocks:
        match block["type"]:
            case "text":
                content.add_text(_string(where, block.get("text")))
            case "image" if role == "user":
                content.add_image(image_of_source(where, block))
            case "thinking":
                thoughts.append(_string(where, block.get("thinking")))
            case "tool_use":
                calls.append(_call(where, block))
            case other:
                raise ValueError(
                    f"{where}: blocks of type {other!r} are not supported; send texts, tools, and images of the user"
                )
    message: dict[str, Any] = {"role": role, "content": content.shown()}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _call(where: str, block: Mapping[str, Any]) -> dict[str, Any]:
    name, arguments = block.get("name"), block.get("input")
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise ValueError(f"{where}: a tool_use needs a name and an input")
    return {"id": block.get("id"), "type": "function", "function": {"name": name, "arguments": arguments}}


def _function(where: str, tool: Mapping[str, Any]) -> dict[str, Any]:
    name, schema = tool.get("name"), tool.get("input_schema")
    if not isinstance(name, str) or not isinstance(schema, dict):
        raise ValueError(f"{where}: a tool needs a name and an input_schema; server tools are not supported")
    described = {"description": tool["description"]} if tool.get("description") else {}
    return {"type": "function", "function": {"name": name, **described, "parameters": schema}}


def _text(where: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    parts = []
    for block in _blocks(where, content):
        if block["type"] != "text":
            raise ValueError(f"{where}: blocks of type {block['type']!r} are not supported; send texts")
        parts.append(_string(where, block.get("text")))
    return "".join(parts)


def _blocks(where: str, content: Any) -> Messages:
    if not isinstance(content, list) or any(not isinstance(one, dict) or "type" not in one for one in content):
        raise ValueError(f"{where}: content must be a text or a list of blocks")
    return content


def _string(where: str, text: Any) -> str:
    if not isinstance(text, str):
        raise ValueError(f"{where}: a block's text must be a text")
    return text


Answer = dict[str, Any]
TextKind = Literal["thinking", "text"]
EMPTY: Answer = {"type": "text", "text": ""}


def message(model: str, found: Message, usage: TokenUsage) -> Answer:
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
    """The events of one stream, and the blocks of the whole answer.

    An answer without text and calls has an empty text, both in the stream and in the whole answer, because clients read
    the first block without a check.
    """

    def __init__(self, model: str) -> None:
        self._model = model
        self._end: Answer = {}
        self._index = -1
        self._open: TextKind | None = None
        self._called = False
        self._has_text = False

    def begin(self, usage: TokenUsage) -> Answer:
        head = {**_head(self._model), "content": [], "stop_reason": None, "stop_sequence": None}
        return {"type": "message_start", "message": {**head, "usage": usage_of(usage)}}

    def of(self, piece: worker_pb2.TextPiece) -> Iterator[Answer]:
        if piece.reasoning:
            yield from self._text("thinking", "thinking_delta", piece.reasoning)
        if piece.content:
            self._has_text = True
            yield from self._text("text", "text_delta", piece.content)
        if piece.HasField("tool_call"):
            yield from self._call(piece.tool_call)
        if piece.HasField("end"):
            yield from self._closed()
            if not self._has_text and not self._called:
                yield self._begun(EMPTY)
                yield {"type": "content_block_stop", "index": self._index}
            self._end = _end(piece.end, called=self._called)

    def end(self, usage: TokenUsage) -> Iterator[Answer]:
        """Yield the events that follow the last piece."""
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
    """Return one page of models. Each model has a name and its creation time in Unix seconds.

    Raises NotFound for an unknown cursor.
    """
    names = [name for name, _ in models]
    for cursor in (after, before):
        if cursor is not None and cursor not in names:
            raise NotFound(f"there is no model {cursor[:100]!r}; use an id of the list, or no cursor")
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


def usage_of(usage: TokenUsage) -> Answer:
    """Return the usage. `input_tokens` does not include cached tokens."""
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
    """Return the arguments of a call as an object.

    If the model wrote a value of another type, put the value into an object.
    """
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
