"""Bodies of Anthropic's messages, as the conversations that chat templates know."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

import orjson
from pydantic import ConfigDict, Field, model_validator
from tinsmith_rpc import worker_pb2

from tinsmith_server.wire.dialects.texts import Prompt, TextRequest, checked_stops, refuse_unknown
from tinsmith_server.wire.requests import Finite, NonNegative, Request, SamplingParams, Words

Messages = list[dict[str, Any]]


# What clients may send though it is not read: it changes no sample.
WITHOUT_EFFECT = frozenset(
    {
        *("billing_policy", "cache_control", "diagnostics", "fallback_credit_token", "inference_geo", "metadata"),
        *("speed", "user_profile_id", "workspace_id"),
    }
)


class CountTokensRequest(Request):
    """The parts of a prompt. A field that is not known here is refused, unless it changes no sample."""

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
        if self.tool_choice is not None and self.tool_choice.get("type") not in ("auto", "none"):
            raise ValueError("tool_choice: this server lets the model choose (auto), or shows it no tools (none)")
        if (self.output_config or {}).get("format") is not None:
            raise ValueError("output_config.format: this server does not bind the answer to a form; leave it out")
        self._check_unknown()
        self.conversation()
        self.functions()
        return self

    def _check_unknown(self) -> None:
        """A prompt is counted with whatever it would be sampled with."""
        unknown = dict(self.model_extra or {})
        if _edits_nothing(unknown.get("context_management")):
            unknown.pop("context_management", None)
        refuse_unknown(unknown, WITHOUT_EFFECT | MessagesRequest.model_fields.keys())

    def conversation(self) -> Messages:
        """Raises ValueError."""
        found: Messages = []
        if self.system:
            found.append({"role": "system", "content": _text("system", self.system)})
        for index, message in enumerate(self.messages):
            found.extend(_messages(f"messages.{index}", message))
        return found

    def functions(self) -> list[dict[str, Any]]:
        """Raises ValueError."""
        if self.tool_choice is not None and self.tool_choice.get("type") == "none":
            return []
        return [_function(f"tools.{index}", tool) for index, tool in enumerate(self.tools or ())]

    def prompt(self) -> Prompt:
        """An answer that the last message has begun is gone on with."""
        messages, tools = self.conversation(), self.functions()
        begun = messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls")
        rendered = worker_pb2.RenderPromptRequest(
            conversation=orjson.dumps(messages).decode(),
            tools=orjson.dumps(tools).decode() if tools else "",
            variables=orjson.dumps(self._variables()).decode(),
            continue_last=begun,
        )
        return Prompt(rendered)

    def _variables(self) -> dict[str, Any]:
        """As chat templates that can be told whether to think are told; others have no ear for it."""
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
        )


def _edits_nothing(management: Any) -> bool:
    """Tell whether a context is kept as it is, as Claude Code asks for."""
    edits = management.get("edits") if isinstance(management, dict) else None
    return not management or (isinstance(edits, list) and all(_keeps_all(edit) for edit in edits))


def _keeps_all(edit: Any) -> bool:
    return isinstance(edit, dict) and edit.get("keep") == "all"


def _messages(where: str, message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Results of tools are messages of their own, before what else their message says."""
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
    said = [block for block in blocks if block["type"] != "tool_result"]
    if said or not blocks:
        yield _said(where, role, said)


def _said(where: str, role: str, blocks: Messages) -> dict[str, Any]:
    texts, thoughts, calls = [], [], []
    for block in blocks:
        match block["type"]:
            case "text":
                texts.append(_string(where, block.get("text")))
            case "thinking":
                thoughts.append(_string(where, block.get("thinking")))
            case "tool_use":
                calls.append(_call(where, block))
            case other:
                raise ValueError(f"{where}: blocks of type {other!r} are not taken here; texts and tools are")
    message: dict[str, Any] = {"role": role, "content": "".join(texts)}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _call(where: str, block: Mapping[str, Any]) -> dict[str, Any]:
    name, arguments = block.get("name"), block.get("input")
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise ValueError(f"{where}: a tool_use has a name and an input")
    return {"id": block.get("id"), "type": "function", "function": {"name": name, "arguments": arguments}}


def _function(where: str, tool: Mapping[str, Any]) -> dict[str, Any]:
    name, schema = tool.get("name"), tool.get("input_schema")
    if not isinstance(name, str) or not isinstance(schema, dict):
        raise ValueError(f"{where}: a tool has a name and an input_schema; tools of the server's own are not here")
    described = {"description": tool["description"]} if tool.get("description") else {}
    return {"type": "function", "function": {"name": name, **described, "parameters": schema}}


def _text(where: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    parts = []
    for block in _blocks(where, content):
        if block["type"] != "text":
            raise ValueError(f"{where}: blocks of type {block['type']!r} are not taken here; texts are")
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
