"""What both chat dialects ask for and are answered, before either has put it into its own words."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from tinsmith_rpc import wire_pb2, worker_pb2

from tinsmith_server.wire.json_bodies import Shape
from tinsmith_server.wire.requests import SamplingParams

# A conversation is one value for each few words of it, and a tool some dozens.
CONVERSATION = Shape(values=65536, depth=48)
MAX_STOP_STRINGS = 64
MAX_STOP_CHARACTERS = 1024


@dataclass(frozen=True, slots=True)
class Prompt:
    """A text or a conversation for the model's own tokenizer, or its tokens, as int32."""

    rendered: worker_pb2.RenderPromptRequest | None = None
    tokens: bytes = b""


@dataclass(frozen=True, slots=True)
class TextRequest:
    """`choices` sequences are drawn for each prompt. `stops` end them beside the model's own ends.

    `logprobs`: so many of the likeliest tokens come with each; None: no logprobs at all. `echo`: the prompt comes
    before what is drawn.
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


@dataclass(slots=True)
class Usage:
    """Tokens. The cached ones are of the prompt's."""

    prompt: int = 0
    sampled: int = 0
    cached: int = 0


@dataclass(slots=True)
class Message:
    """One sequence, put together of its pieces."""

    content: str = ""
    reasoning: str = ""
    calls: list[worker_pb2.ToolCall] = field(default_factory=list)
    tokens: list[worker_pb2.TokenText] = field(default_factory=list)
    end: worker_pb2.SequenceEnd = field(default_factory=worker_pb2.SequenceEnd)

    @property
    def ran_to_its_length(self) -> bool:
        return self.end.reason == wire_pb2.LENGTH

    def add(self, piece: worker_pb2.TextPiece) -> None:
        self.content += piece.content
        self.reasoning += piece.reasoning
        self.tokens.extend(piece.tokens)
        if piece.HasField("tool_call"):
            self.calls.append(piece.tool_call)
        if piece.HasField("end"):
            self.end = piece.end


def checked_stops(stop: str | Iterable[str] | None) -> tuple[str, ...]:
    """Raises ValueError, in words."""
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > MAX_STOP_STRINGS:
        raise ValueError(f"{len(stops)} strings to stop at; at most {MAX_STOP_STRINGS} are taken")
    if any(not one or len(one) > MAX_STOP_CHARACTERS for one in stops):
        raise ValueError(f"a string to stop at has 1 to {MAX_STOP_CHARACTERS} characters")
    return stops
