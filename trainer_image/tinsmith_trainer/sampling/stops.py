"""When a sequence ends: token ids, or strings found in the decoded text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tinsmith_trainer.sampling.base import SamplingParams

INCOMPLETE = "\ufffd"
LONGEST_WAIT_TOKENS = 64  # tokens that never make a whole character: bounds what is decoded again and again
LONGEST_CHARACTER_TOKENS = 8  # it has four bytes at most


@dataclass(frozen=True, slots=True)
class StopRule:
    """What ends the sequences of a job.

    Ids that a request lists replace the model's end-of-sequence ids, and strings are beside them: renderers of base
    models stop at the next speaker's name and read an end of sequence as another way to end, and a game that stops
    at a bracket cannot read an answer that went on after its end. Nothing listed leaves nothing.
    """

    token_ids: frozenset[int]
    strings: tuple[str, ...]

    @classmethod
    def of(cls, params: SamplingParams, eos_token_ids: Sequence[int]) -> StopRule:
        listed, strings = frozenset(params.stop_tokens or ()), params.stop_strings or ()
        unset = params.stop_tokens is None and params.stop_strings is None
        return cls(frozenset(eos_token_ids) if unset or (strings and not listed) else listed, strings)

    def watch(self, tokenizer: Any) -> StopWatch:
        return StopWatch(self, tokenizer)


class StopWatch:
    """Follows one sequence, token by token."""

    def __init__(self, rule: StopRule, tokenizer: Any) -> None:
        self._token_ids = rule.token_ids
        self._strings = rule.strings
        self._keep = max((len(string) for string in rule.strings), default=1) - 1
        self._text = IncrementalText(tokenizer)
        self._tail = ""

    def sees_end(self, token: int) -> bool:
        """Takes the next token; true if it is a stop id or completes a stop string."""
        if token in self._token_ids:
            return True
        if not self._strings:
            return False
        window = self._tail + self._text.push(token)
        self._tail = window[-self._keep :] if self._keep else ""
        return any(string in window for string in self._strings)


class IncrementalText:
    """Decodes a growing sequence. Its pieces, joined, are the text of the whole.

    A token may hold a part of a character, and what a tokenizer prints for a token depends on the
    one before it. So a piece is the difference between two decodings of the last few tokens, and
    waits while the text ends in the middle of a character.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._context: list[int] = []
        self._pending: list[int] = []

    def push(self, token: int) -> str:
        """The text that this token completes, maybe none."""
        self._pending.append(token)
        before = self._decode(self._context)
        now = self._decode(self._context + self._pending)
        if now.endswith(INCOMPLETE) and len(self._pending) < LONGEST_WAIT_TOKENS:
            return ""
        self._context, self._pending = self._pending, []
        return now[len(before) :]

    def rest(self) -> str:
        """At the end: the text of tokens that never made a whole character."""
        before = self._decode(self._context)
        pending, self._pending = self._pending, []
        return self._decode(self._context + pending)[len(before) :]

    def _decode(self, tokens: list[int]) -> str:
        return _text_of(self._tokenizer, tokens)


def ends_within_character(tokens: Sequence[int], tokenizer: Any) -> bool:
    """Whether the text of these tokens ends with a character of which bytes are missing."""
    return _text_of(tokenizer, list(tokens[-LONGEST_CHARACTER_TOKENS:])).endswith(INCOMPLETE)


def _text_of(tokenizer: Any, tokens: list[int]) -> str:
    text: str = tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text
