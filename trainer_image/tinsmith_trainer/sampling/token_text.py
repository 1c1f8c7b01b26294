"""The text of tokens that follow other tokens: the text of a growing sequence, and the text of a single token.

Some decoders, such as SentencePiece in Llama 2 and WordPiece, remove a space from the first token. So drawn tokens are
decoded together with the last tokens of the prompt. Samplers search stop strings in the text of this module, and
readers see the same text.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

Tokens = Sequence[int] | NDArray[np.int32]

INCOMPLETE = "\ufffd"
LONGEST_WAIT_TOKENS = 64  # limits repeated decoding of tokens that never make a whole character
LONGEST_CHARACTER_TOKENS = 8  # a character has at most four bytes
ANCHOR = "a"
"""A text that is placed before a single token, so that this token is not decoded as the first token."""


class IncrementalText:
    """The text of a growing sequence after a prompt, in pieces.

    A token may hold only a part of a character, and the text of a token depends on the previous token. So a piece is
    the difference between two decodings of the last few tokens. No piece is returned while the text ends within a
    character.

    If a character begins in the prompt and ends in the sequence, the pieces include this character. With `echoed`, the
    pieces also include the bytes of an incomplete character, because the echo of the prompt is shown without these
    bytes.
    """

    def __init__(self, tokenizer: Any, prompt: Tokens = (), *, echoed: bool = False) -> None:
        self._tokenizer = tokenizer
        self._prompt: Tokens | None = prompt
        self._echoed = echoed
        self._context: list[int] = []
        self._pending: list[int] = []
        self._shown: list[int] = []  # the pending tokens whose text belongs to the prompt

    def push(self, token: int) -> str:
        """Return the text that this token completes. The text may be empty."""
        if self._prompt is not None:  # not earlier, because samplers check a prompt before they draw
            self._context, self._pending = last_characters(self._prompt, self._tokenizer)
            self._shown = [] if self._echoed else list(self._pending)
            self._prompt = None
        self._pending.append(token)
        now = self._decode(self._context + self._pending)
        if now.endswith(INCOMPLETE) and len(self._pending) < LONGEST_WAIT_TOKENS:
            return ""
        grown = self._grown(now)
        self._context, self._pending, self._shown = self._pending, [], []
        return grown

    def rest(self) -> str:
        """Return the text of the last tokens, which did not complete a character, and forget these tokens."""
        grown = self._grown(self._decode(self._context + self._pending))
        self._pending, self._shown = [], []
        return grown

    def _grown(self, now: str) -> str:
        for shown in [self._shown, []] if self._shown else [[]]:
            if now.startswith(before := self._decode(self._context + shown)):
                return now[len(before) :]
        # Bytes that make no character have changed the decoding of the bytes before them.
        anchor = self._tokenizer(ANCHOR, add_special_tokens=False)["input_ids"]
        return self._decode(anchor + self._pending).removeprefix(self._decode(anchor))

    def _decode(self, tokens: list[int]) -> str:
        return text_of(self._tokenizer, tokens)


class TokenTexts:
    """The text that each token of a vocabulary has after another token."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}

    def __call__(self, token: int) -> str:
        if token not in self._known:
            anchor, anchor_text = self._anchor
            behind = text_of(self._tokenizer, [*anchor, token])
            is_longer = behind.startswith(anchor_text)
            self._known[token] = behind[len(anchor_text) :] if is_longer else self.first(token)
        return self._known[token]

    @cached_property
    def _anchor(self) -> tuple[list[int], str]:
        anchor: list[int] = self._tokenizer(ANCHOR, add_special_tokens=False)["input_ids"]
        return anchor, text_of(self._tokenizer, anchor)

    def first(self, token: int) -> str:
        """Return the text that a token has at the beginning of a text."""
        return text_of(self._tokenizer, [token])


def last_characters(prompt: Tokens, tokenizer: Any) -> tuple[list[int], list[int]]:
    """Return the last tokens that form whole characters, and the tokens of an incomplete character at the end."""
    tokens = [int(token) for token in prompt[-2 * LONGEST_CHARACTER_TOKENS :]]
    for open_tokens in range(min(len(tokens), LONGEST_CHARACTER_TOKENS)):
        end = len(tokens) - open_tokens
        for start in range(end - 1, max(-1, end - 1 - LONGEST_CHARACTER_TOKENS), -1):
            text = text_of(tokenizer, tokens[start:end])
            if text and INCOMPLETE not in text:
                return tokens[start:end], tokens[end:]
    return tokens[-LONGEST_CHARACTER_TOKENS:], []


def ends_within_character(tokens: Sequence[int], tokenizer: Any) -> bool:
    """Return whether the text of these tokens ends with an incomplete character."""
    return text_of(tokenizer, list(tokens[-LONGEST_CHARACTER_TOKENS:])).endswith(INCOMPLETE)


def text_of(tokenizer: Any, tokens: Sequence[int], *, special: bool = True) -> str:
    """Decode tokens. Special tokens are included unless `special` is false."""
    text: str = tokenizer.decode(list(tokens), skip_special_tokens=not special, clean_up_tokenization_spaces=False)
    return text
