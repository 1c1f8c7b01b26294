"""How what is said becomes a model's prompt, and its tokens an answer: as a chat, or token for token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import tinker
from tinker_cookbook.completers import StopCondition
from tinker_cookbook.renderers import Message, Renderer, get_text_content

Said: TypeAlias = str | Sequence[Message] | Sequence[int]
"""With a renderer a string, which is a user's message, or messages; without, tokens."""


class Conversation(Protocol):
    """Of one environment with its model, in turns."""

    def hear(self, said: Any) -> None:
        """Goes on with what the environment says. Raises TypeError for what is not its kind."""

    def observation(self) -> tuple[tinker.ModelInput, StopCondition]:
        """All of it so far, and where an answer ends."""

    def answer(self, tokens: list[int]) -> Any:
        """Goes on with what the model says, and reads it."""


def conversation(renderer: Renderer | None) -> Conversation:
    """A new one."""
    return TokenConversation() if renderer is None else ChatConversation(renderer)


class TokenConversation:
    """Tokens after tokens; an answer ends where it is as long as it may be."""

    def __init__(self) -> None:
        self._tokens: list[int] = []

    def hear(self, said: Any) -> None:
        if isinstance(said, str) or not all(type(token) is int for token in said):
            raise TypeError(f"without a renderer prompts are lists of tokens, and this one is {said!r:.80}")
        self._tokens += said

    def observation(self) -> tuple[tinker.ModelInput, StopCondition]:
        return tinker.ModelInput.from_ints(list(self._tokens)), []

    def answer(self, tokens: list[int]) -> list[int]:
        self._tokens += tokens
        return tokens


class ChatConversation:
    """Messages, as the renderer writes them. An answer that was cut off is read as far as it goes."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._messages: list[Message] = []

    def hear(self, said: Any) -> None:
        if isinstance(said, str):
            said = [Message(role="user", content=said)]
        if not all(isinstance(message, dict) for message in said):
            raise TypeError(f"with a renderer prompts are strings or messages, and this one is {said!r:.80}")
        self._messages += said

    def observation(self) -> tuple[tinker.ModelInput, StopCondition]:
        return self._renderer.build_generation_prompt(self._messages), self._renderer.get_stop_sequences()

    def answer(self, tokens: list[int]) -> str:
        message, _ = self._renderer.parse_response(tokens)
        self._messages.append(message)
        return get_text_content(message)
