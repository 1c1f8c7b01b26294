"""What samples need to know of a base model's language, whoever knows it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from tinsmith_rpc import worker_pb2
from typing_extensions import override


@dataclass(frozen=True, slots=True)
class Delta:
    """What a message has grown by. Either text, or one whole call: a function's `name` with `arguments` in JSON."""

    content: str = ""
    reasoning: str = ""
    name: str = ""
    arguments: str = ""


class TextParser(Protocol):
    """Takes the text of one sequence piece by piece."""

    def feed(self, text: str) -> list[Delta]: ...

    def finish(self) -> list[Delta]:
        """What was held back."""


class PlainText(TextParser):
    """Of what is no message, or of a model of which nobody says how its messages are read."""

    @override
    def feed(self, text: str) -> list[Delta]:
        return [Delta(content=text)] if text else []

    @override
    def finish(self) -> list[Delta]:
        return []


class Language(Protocol):
    """Of one base model. Methods may be called from any thread."""

    @property
    def tokenizer(self) -> Any:
        """transformers' own."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """All ids at which generation ends by default."""

    @property
    def special_tokens(self) -> frozenset[int]:
        """Those that stand for no text."""

    def render(self, request: worker_pb2.RenderPromptRequest) -> list[int]:
        """The prompt's tokens. Raises UserError with the chat template's own words where it refuses."""

    def message_parser(self, prompt: NDArray[np.int32], tools: str) -> TextParser | None:
        """Of an answer to this prompt; None where nobody says how this model's answers are read.

        Raises ValueError for tools, or a response template, that are none.
        """
