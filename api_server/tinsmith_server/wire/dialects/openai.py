"""OpenAI's requests and answers."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import orjson
from pydantic import ConfigDict, Field, model_validator
from tinsmith_rpc import wire_pb2, worker_pb2
from typing_extensions import override

from tinsmith_server.wire.dialects.constraints import (
    forced_calls,
    logit_bias,
    of_response_format,
    of_structured_outputs,
)
from tinsmith_server.wire.dialects.images import Content, Images, image_of_url
from tinsmith_server.wire.dialects.texts import (
    Message,
    Prompt,
    TextRequest,
    TokenUsage,
    checked_stops,
    refuse,
    refuse_unknown,
)
from tinsmith_server.wire.json_bodies import pack
from tinsmith_server.wire.requests import Count, Finite, NonNegative, Request, SamplingParams, Words

MOST_CHOICES = 128
MOST_PROMPTS = 128
MOST_LIKELIEST = 20
DEFAULT_COMPLETION_TOKENS = 16
TOKEN_LIMIT = 2**31
REASONING_FIELDS = ("reasoning", "reasoning_content")
"""The newer name and the older name of the field in which other servers return reasoning.

Chat templates read the older name.
"""
MESSAGE_FIELDS = frozenset(
    {
        *("role", "content", "refusal", "name", "tool_call_id", "tool_calls", *REASONING_FIELDS),
        *("annotations", "cache_control", "provider_specific_fields"),
    }
)
"""The fields of a message.

The fields in the last line of the set are ignored. Ignored fields are notes about caches, and notes in answers that
clients send back (LiteLLM adds some to every answer).
"""

# Fields that clients may send and that are ignored: they change no sample.
WITHOUT_EFFECT = frozenset(
    {
        "cache_salt",
        "metadata",
        "prediction",
        "priority",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "request_id",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)

Positive = Annotated[int, Field(ge=1, lt=2**31)]
Likeliest = Annotated[Count, Field(le=MOST_LIKELIEST)]
Penalty = Annotated[Finite, Field(ge=-2, le=2)]


class StreamOptions(Request):
    include_usage: bool = False


class OpenAiRequest(Request):
    """The fields that completions and chat completions have in common.

    `top_k` and `structured_outputs` are extensions that other servers have, too. An unknown field is refused, unless it
    cannot change a sample.
    """

    model_config = ConfigDict(extra="allow")

    model: str
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: str | Words | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: NonNegative | None = None
    top_p: Annotated[Finite, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] = -1
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check_supported(self) -> OpenAiRequest:
        checked_stops(self.stop)
        if self.top_k == 0:
            raise ValueError("top_k must be at least 1, or -1 for all tokens")
        logit_bias(self.logit_bias)
        self.constraint()
        refuse_unknown(self.model_extra or {}, WITHOUT_EFFECT)
        return self

    @property
    def streams_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def constraint(self) -> worker_pb2.Constraint | None:
        """Return the constraint of the answer, or None. Raises ValueError."""
        found = [of_response_format(self.response_format), of_structured_outputs(self.structured_outputs)]
        if None not in found:
            raise ValueError("response_format and structured_outputs exclude each other; send one of them")
        return next((one for one in found if one is not None), None)

    def logit_changes(self) -> dict[str, Any]:
        """Return the fields of a text request that change the logits."""
        return {
            "frequency_penalty": self.frequency_penalty or 0.0,
            "presence_penalty": self.presence_penalty or 0.0,
            "logit_bias": logit_bias(self.logit_bias),
            "constraint": self.constraint(),
        }

    def params(self, max_tokens: int | None) -> SamplingParams:
        return SamplingParams(
            max_tokens=max_tokens,
            seed=self.seed,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=self.top_k,
            top_p=1.0 if self.top_p is None else self.top_p,
        )


class CompletionRequest(OpenAiRequest):
    """The request of a completion. `logprobs` is the number of most likely tokens that are returned with each token."""

    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: Count | None = None
    logprobs: Likeliest | None = None
    best_of: int | None = None
    echo: bool | None = None
    suffix: str | None = None

    @model_validator(mode="after")
    def _is_a_plain_completion(self) -> CompletionRequest:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise ValueError("best_of is not supported: use n, and choose yourself")
        refuse("suffix", self.suffix)
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens: 0 is only for echo: set echo, or request 1 or more")
        prompts = _prompts(self.prompt)
        if not 1 <= len(prompts) <= MOST_PROMPTS:
            raise ValueError(f"prompt: 1 to {MOST_PROMPTS} prompts are allowed in one request")
        if any(not 0 <= token < TOKEN_LIMIT for one in prompts if not isinstance(one, str) for token in one):
            raise ValueError("prompt: contains a number that is not a token id")
        return self

    def text_request(self) -> TextRequest:
        return TextRequest(
            model=self.model,
            prompts=tuple(_prompt(one) for one in _prompts(self.prompt)),
            params=self.params(DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens),
            stops=checked_stops(self.stop),
            choices=self.n or 1,
            logprobs=self.logprobs,
            echo=bool(self.echo),
            **self.logit_changes(),
        )


class ChatCompletionRequest(OpenAiRequest):
    """The request of a chat completion.

    `chat_template_kwargs` is an extension: it sets variables of the model's chat template.
    """

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    max_tokens: Positive | None = None
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: Likeliest | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    functions: list[Any] | None = None
    modalities: list[str] | None = None

    @model_validator(mode="after")
    def _is_a_plain_conversation(self) -> ChatCompletionRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs true")
        refuse("functions (use tools)", self.functions)
        refuse("modalities", [one for one in self.modalities or () if one != "text"])
        conversation(self.messages, [])
        return self

    @override
    def constraint(self) -> worker_pb2.Constraint | None:
        """Return the constraint of the answer, or None. A forced call has no content, so no format applies to it."""
        found, forces = super().constraint(), self.tool_choice not in (None, "auto", "none")
        if not forces:
            if found is not None and self.tools and self.tool_choice != "none":
                found.or_tool_calls.single = self.parallel_tool_calls is False
            return found
        name = None if self.tool_choice == "required" else _chosen_tool(self.tool_choice)
        names = [_tool_name(tool) for tool in self.tools or ()]
        return forced_calls(names, name, single=name is not None or self.parallel_tool_calls is False)

    def text_request(self) -> TextRequest:
        tools = orjson.dumps(self.tools).decode() if self.tools and self.tool_choice != "none" else ""
        images: Images = []
        rendered = worker_pb2.RenderPromptRequest(
            conversation=orjson.dumps(conversation(self.messages, images)).decode(),
            tools=tools,
            variables=orjson.dumps(self._variables()).decode(),
            images=len(images),
        )
        return TextRequest(
            model=self.model,
            prompts=(Prompt(rendered, images=tuple(images)),),
            params=self.params(self.max_completion_tokens or self.max_tokens),
            stops=checked_stops(self.stop),
            choices=self.n or 1,
            chat=True,
            tools=tools,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            **self.logit_changes(),
        )

    def _variables(self) -> dict[str, Any]:
        effort = {"reasoning_effort": self.reasoning_effort} if self.reasoning_effort is not None else {}
        return {**effort, **(self.chat_template_kwargs or {})}


def _chosen_tool(choice: object) -> str:
    name = _tool_name(choice) if isinstance(choice, dict) and choice.get("type") == "function" else None
    if name is None:
        raise ValueError("tool_choice must be auto, none, required, or an object of type function with a name")
    return name


def _tool_name(tool: Mapping[str, Any]) -> str | None:
    function = tool.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) and name else None


def conversation(messages: Sequence[Mapping[str, Any]], images: Images) -> list[dict[str, Any]]:
    """Return the messages in the form that chat templates read: texts are joined, and arguments are objects.

    The images are added to `images`. Raises ValueError for content that chat templates cannot read.
    """
    return [_message(f"messages.{index}", message, images) for index, message in enumerate(messages)]


def _message(where: str, message: Mapping[str, Any], images: Images) -> dict[str, Any]:
    role = message.get("role")
    if role not in ("system", "developer", "user", "assistant", "tool"):
        raise ValueError(f"{where}: role must be system, developer, user, assistant or tool")
    _check_fields(where, role, message)
    content = message.get("refusal") if message.get("content") is None else message["content"]
    shown: dict[str, Any] = {
        "role": "system" if role == "developer" else role,
        "content": _content(f"{where}.content", content, images)
        if role == "user"
        else _text(f"{where}.content", content),
    }
    shown |= {name: message[name] for name in ("name", "tool_call_id") if message.get(name) is not None}
    for name in REASONING_FIELDS:
        if (reasoning := message.get(name)) is not None:
            shown["reasoning_content"] = _text(f"{where}.{name}", reasoning)
    if calls := message.get("tool_calls"):
        shown["tool_calls"] = [
            _tool_call(f"{where}.tool_calls", call) for call in _listed(f"{where}.tool_calls", calls)
        ]
    return shown


def _check_fields(where: str, role: str, message: Mapping[str, Any]) -> None:
    """Refuse a message with fields that cannot become a part of the prompt."""
    for name in sorted(message.keys() - MESSAGE_FIELDS):
        refuse(f"{where}.{name}", message[name])
    if role != "assistant" and message.get("content") is None:
        raise ValueError(f"{where}.content is missing: only an assistant's message may omit it")


def _content(where: str, content: Any, images: Images) -> str | list[Mapping[str, str]]:
    """Return the content of a user's message, which may have images."""
    if content is None or isinstance(content, str):
        return content or ""
    found = Content(images)
    for part in _listed(where, content):
        if isinstance(part, dict) and part.get("type") == "image_url":
            found.add_image(image_of_url(where, part))
        else:
            found.add_text(_part(where, part))
    return found.shown()


def _text(where: str, content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(_part(where, part) for part in _listed(where, content))


def _part(where: str, part: Any) -> str:
    text = part.get("text") if isinstance(part, dict) and part.get("type") in ("text", "refusal") else None
    if not isinstance(text, str):
        raise ValueError(f"{where}: only texts are supported, and images in messages of the user")
    return text


def _tool_call(where: str, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(f"{where}: a call needs a function with a name and arguments")
    return {
        "id": call.get("id"),
        "type": "function",
        "function": {"name": function["name"], "arguments": _arguments(where, function.get("arguments") or "{}")},
    }


def _arguments(where: str, arguments: Any) -> dict[str, Any]:
    try:
        content = orjson.loads(arguments) if isinstance(arguments, str) else arguments
    except orjson.JSONDecodeError as error:
        raise ValueError(f"{where}: the arguments are not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{where}: the arguments must be a JSON object")
    return content


def _listed(where: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{where} must be a text or a list")
    return value


Tokens = Sequence[int]


def _prompts(prompt: str | list[str] | list[int] | list[list[int]]) -> list[str | Tokens]:
    if isinstance(prompt, str):
        return [prompt]
    numbers = [one for one in prompt if isinstance(one, int)]
    return [numbers] if numbers else [one for one in prompt if not isinstance(one, int)]


def _prompt(prompt: str | Tokens) -> Prompt:
    if isinstance(prompt, str):
        return Prompt(worker_pb2.RenderPromptRequest(text=prompt))
    return Prompt(tokens=pack("i", prompt))


Answer = dict[str, Any]
STAGES = {worker_pb2.BEFORE_MASK: "before_mask", worker_pb2.AFTER_MASK: "after_mask"}


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """The fields that all chunks of an answer have in common. The answer's ID begins with `prefix`."""

    model: str
    prefix: str
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def answer(self, kind: str, choices: list[Answer], usage: TokenUsage | None = None) -> Answer:
        head = {"id": f"{self.prefix}-{self.id}", "object": kind, "created": self.created, "model": self.model}
        return {**head, "choices": choices, **({} if usage is None else {"usage": usage_of(usage)})}


def usage_of(usage: TokenUsage) -> Answer:
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.sampled,
        "total_tokens": usage.prompt + usage.sampled,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
    }


def model_list(models: Iterable[tuple[str, int]]) -> Answer:
    """Return the list of models. Each model has a name and its creation time in Unix seconds."""
    return {"object": "list", "data": [model(name, created) for name, created in models]}


def model(name: str, created: int) -> Answer:
    return {"id": name, "object": "model", "created": created, "owned_by": "tinsmith"}


# ---- completions


def completion(head: AnswerHead, messages: Sequence[Message], usage: TokenUsage) -> Answer:
    choices = []
    for index, message in enumerate(messages):
        logprobs = CompletionLogprobs().of(message.tokens, message.logprob_stage) if message.tokens else None
        choices.append(_text_choice(index, message.content, logprobs, _finish(message.end)))
    return head.answer("text_completion", choices, usage)


class CompletionChunks:
    """The chunks of one stream, in the order of the pieces."""

    def __init__(self, head: AnswerHead) -> None:
        self._head = head
        self._logprobs: dict[int, CompletionLogprobs] = {}

    def of(self, index: int, piece: worker_pb2.TextPiece) -> list[Answer]:
        logprobs = None
        if piece.tokens:
            logprobs = self._logprobs.setdefault(index, CompletionLogprobs()).of(piece.tokens, piece.logprob_stage)
        finish = _finish(piece.end) if piece.HasField("end") else None
        if not (piece.content or logprobs or finish):
            return []
        return [self._head.answer("text_completion", [_text_choice(index, piece.content, logprobs, finish)])]

    def usage(self, usage: TokenUsage) -> Answer:
        return self._head.answer("text_completion", [], usage)


class CompletionLogprobs:
    """The logprobs of one choice. Offsets count in the text of the choice, and tokens without text have no width."""

    def __init__(self) -> None:
        self._offset = 0

    def of(self, tokens: Sequence[worker_pb2.TokenText], stage: worker_pb2.LogprobStage.ValueType) -> Answer:
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += token.width
        return {
            "tokens": [token.text for token in tokens],
            "token_logprobs": [token.logprob if token.HasField("logprob") else None for token in tokens],
            "top_logprobs": [_by_text(token.likeliest) if token.HasField("logprob") else None for token in tokens],
            "text_offset": offsets,
            **_stage(stage),
        }


def _by_text(likeliest: Iterable[worker_pb2.TokenText]) -> Mapping[str, float]:
    """Return the logprob of each text. If several tokens have the same text, the most likely token counts."""
    found: dict[str, float] = {}
    for one in likeliest:
        found.setdefault(one.text, one.logprob)
    return found


def _text_choice(index: int, text: str, logprobs: Answer | None, finish: str | None) -> Answer:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}


# ---- chat completions


def chat_completion(head: AnswerHead, messages: Sequence[Message], usage: TokenUsage) -> Answer:
    choices = []
    for index, message in enumerate(messages):
        shown: Answer = {"role": "assistant", "content": message.content or (None if message.calls else "")}
        if message.reasoning:
            shown["reasoning_content"] = message.reasoning
        if message.calls:
            shown["tool_calls"] = [_call(call) for call in message.calls]
        finish = _finish(message.end, called=bool(message.calls))
        logprobs = _content_logprobs(message.tokens, message.logprob_stage)
        choices.append({"index": index, "message": shown, "logprobs": logprobs, "finish_reason": finish})
    return head.answer("chat.completion", choices, usage)


class ChatChunks:
    """The chunks of one stream, in the order of the pieces.

    A tool call is one chunk, because only a complete call can be parsed.
    """

    def __init__(self, head: AnswerHead) -> None:
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
        logprobs = _content_logprobs(piece.tokens, piece.logprob_stage)
        if not (delta or logprobs or finish):
            return []
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return [self._head.answer("chat.completion.chunk", [choice])]

    def usage(self, usage: TokenUsage) -> Answer:
        return self._head.answer("chat.completion.chunk", [], usage)


def _call(call: worker_pb2.ToolCall) -> Answer:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


def _finish(end: worker_pb2.SequenceEnd, *, called: bool = False) -> str:
    if end.reason == wire_pb2.LENGTH:
        return "length"
    return "tool_calls" if called else "stop"


def _content_logprobs(
    tokens: Sequence[worker_pb2.TokenText], stage: worker_pb2.LogprobStage.ValueType
) -> Answer | None:
    return {"content": [_scored(token) for token in tokens], **_stage(stage)} if tokens else None


def _stage(stage: worker_pb2.LogprobStage.ValueType) -> Answer:
    """Return the field that says whether logprobs are before or after the mask, if the request has a mask."""
    return {"stage": STAGES[stage]} if stage in STAGES else {}


def _scored(token: worker_pb2.TokenText) -> Answer:
    return {**_one(token), "top_logprobs": [_one(one) for one in token.likeliest]}


def _one(token: worker_pb2.TokenText) -> Answer:
    """Return the logprobs of one token. `bytes` is None if the token is only a part of a character."""
    whole = None if "\ufffd" in token.text else list(token.text.encode())
    return {"token": token.text, "logprob": token.logprob, "bytes": whole}
