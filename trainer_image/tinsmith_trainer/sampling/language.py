"""The parts of a base model's language that samples need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from tinsmith_rpc import worker_pb2
from typing_extensions import override

from tinsmith_trainer.errors import UserError


@dataclass(frozen=True, slots=True)
class Delta:
    """A new piece of a message: a text, or a complete call with a function's `name` and the `arguments` as JSON."""

    content: str = ""
    reasoning: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class Tag:
    """A value between two fixed texts. `schema` is the JSON schema as a JSON text.

    With the form `xml`, the value is an object with one element for each property, as Qwen3.5 writes arguments.
    """

    begin: str
    schema: str
    end: str
    form: Literal["json", "xml"] = "json"


class TextParser(Protocol):
    """A parser for the text of one sequence; the text arrives in pieces."""

    def feed(self, text: str) -> list[Delta]: ...

    def finish(self) -> list[Delta]:
        """Return the rest of the text, which was held back."""


class PlainText(TextParser):
    """The parser for text that is not a message, or for a model with an unknown message format."""

    @override
    def feed(self, text: str) -> list[Delta]:
        return [Delta(content=text)] if text else []

    @override
    def finish(self) -> list[Delta]:
        return []


class Language(Protocol):
    """The language of one base model. Methods are thread-safe."""

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of transformers."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The IDs at which generation ends by default."""

    @property
    def special_tokens(self) -> frozenset[int]:
        """The tokens that have no text."""

    @property
    def image_token(self) -> int | None:
        """The token that chat templates write for an image, or None if the model takes none."""

    def render(self, request: worker_pb2.RenderPromptRequest) -> list[int]:
        """Return the tokens of the prompt.

        Raises UserError with the message of the chat template if the template refuses the conversation.
        """

    def extend(self, request: worker_pb2.RenderPromptRequest) -> list[int]:
        """Return the tokens after the recorded tokens of the request.

        Raises CannotExtend, and the errors of `render`.
        """

    def message_parser(self, prompt: NDArray[np.int32], tools: str) -> TextParser | None:
        """Return a parser of answers to this prompt, or None if the model's message format is unknown.

        Raises ValueError for invalid tools, or for an invalid response template.
        """

    def call_tags(self, tools: str, name: str) -> tuple[Tag, ...]:
        """Return the texts of tool calls in the model's own format. If `name` is set, only this tool may be called.

        Raises UserError if the model's format is unknown, or if no tool has this name.
        """

    def reasoning_end(self, prompt: NDArray[np.int32]) -> str:
        """Return the text that ends the reasoning if the prompt ends within reasoning, otherwise an empty text."""


def without_image_tokens(tokens: Sequence[int], image_token: int | None, images: int) -> tuple[list[int], list[int]]:
    """Return the tokens without those of images, and the number of tokens before each image.

    Raises UserError if the tokens do not have one token for each image: the model takes no images, its chat template
    ignores them, or a text of the conversation contains the token.
    """
    if image_token is None:
        raise UserError("This model does not take images in conversations. Send texts.")
    kept: list[int] = []
    positions: list[int] = []
    for token in tokens:
        if token == image_token:
            positions.append(len(kept))
        else:
            kept.append(token)
    if len(positions) != images:
        raise UserError(
            f"The conversation has {images} images, but the chat template writes {len(positions)} tokens of images. "
            "Send images as chunks through the Tinker API."
        )
    return kept, positions
