"""The parts of requests and answers that both dialects have in common."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field

from tinsmith_rpc import wire_pb2, worker_pb2

from tinsmith_server.wire.json_bodies import Shape
from tinsmith_server.wire.requests import SamplingParams

# The limit is generous: a conversation has one value for every few words, and a tool has some dozens of values.
CONVERSATION = Shape(values=65536, depth=48)
NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "function_call": ("auto", "none"),
    "ignore_eos": (False,),
    "include_reasoning": (True,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "min_p": (0,),
    "min_tokens": (0,),
    "repetition_penalty": (1,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
}
"""Fields of other servers, and the values of each field that have no effect."""
MAX_STOP_STRINGS = 64
MAX_STOP_CHARACTERS = 1024


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt: a text or a conversation for the model's tokenizer, or tokens as int32.

    `end_tokens` are the tokens that end a sequence by default. If they are empty, the worker is asked for them.
    `images` are those of a conversation, in order.
    """

    rendered: worker_pb2.RenderPromptRequest | None = None
    tokens: bytes = b""
    end_tokens: tuple[int, ...] = ()
    images: tuple[wire_pb2.ImageChunk, ...] = ()


@dataclass(frozen=True, slots=True)
class TextRequest:
    """A text request. `choices` sequences are sampled for each prompt.

    A sequence ends at `stops` and at the model's own end tokens. `logprobs` is the number of most likely tokens that
    are returned with each token. If `logprobs` is None, no logprobs are returned. With `echo`, the prompt is returned
    before the answer. With `is_recorded`, the sampler also returns the drawn tokens with their logprobs.
    `constraint` is None if the answer may be any text.
    """

    model: str
    prompts: tuple[Prompt, ...]
    params: SamplingParams
    stops: tuple[str, ...] = ()
    choices: int = 1
    chat: bool = False
    tools: str = ""
    logprobs: int | None = None
    echo: bool = False
    is_recorded: bool = False
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    constraint: worker_pb2.Constraint | None = None


@dataclass(slots=True)
class TokenUsage:
    """The numbers of tokens in a request and its answer.

    The number of the prompt's tokens includes the cached tokens.
    """

    prompt: int = 0
    sampled: int = 0
    cached: int = 0


@dataclass(slots=True)
class MessagePart:
    """A part of a message: a text or a reasoning that grows, or a complete tool call."""

    content: str = ""
    reasoning: str = ""
    call: worker_pb2.ToolCall | None = None


@dataclass(slots=True)
class Message:
    """The message that is built from the pieces of a sequence. `parts` are in the order of the text."""

    parts: list[MessagePart] = field(default_factory=list)
    tokens: list[worker_pb2.TokenText] = field(default_factory=list)
    logprob_stage: worker_pb2.LogprobStage.ValueType = worker_pb2.LOGPROB_STAGE_UNSPECIFIED
    end: worker_pb2.SequenceEnd = field(default_factory=worker_pb2.SequenceEnd)

    @property
    def ran_to_its_length(self) -> bool:
        return self.end.reason == wire_pb2.LENGTH

    @property
    def content(self) -> str:
        return "".join(part.content for part in self.parts)

    @property
    def reasoning(self) -> str:
        return "".join(part.reasoning for part in self.parts)

    @property
    def calls(self) -> list[worker_pb2.ToolCall]:
        return [part.call for part in self.parts if part.call is not None]

    def add(self, piece: worker_pb2.TextPiece) -> None:
        last = self.parts[-1] if self.parts else MessagePart()
        if piece.reasoning:
            if not last.reasoning:
                self.parts.append(last := MessagePart())
            last.reasoning += piece.reasoning
        if piece.content:
            if not last.content:
                self.parts.append(last := MessagePart())
            last.content += piece.content
        if piece.HasField("tool_call"):
            self.parts.append(MessagePart(call=piece.tool_call))
        self.tokens.extend(piece.tokens)
        self.logprob_stage = piece.logprob_stage or self.logprob_stage
        if piece.HasField("end"):
            self.end = piece.end


def refuse(what: str, value: object) -> None:
    """Raise ValueError if the unsupported field `what` has a value."""
    if value:
        raise ValueError(f"{what} is not supported; remove it")


def refuse_unknown(fields: Mapping[str, object], without_effect: Container[str]) -> None:
    """Raise ValueError for an unknown field, unless the field is empty or cannot change a sample."""
    for name, value in fields.items():
        if name not in without_effect and value not in NEUTRAL.get(name, ()):
            refuse(name, value not in (None, [], {}))


def checked_stops(stop: str | Iterable[str] | None) -> tuple[str, ...]:
    """Return the texts at which a sequence stops. Raises ValueError."""
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > MAX_STOP_STRINGS:
        raise ValueError(f"{len(stops)} stop strings; at most {MAX_STOP_STRINGS} are allowed")
    if any(not one or len(one) > MAX_STOP_CHARACTERS for one in stops):
        raise ValueError(f"a stop string must have 1 to {MAX_STOP_CHARACTERS} characters")
    return stops
