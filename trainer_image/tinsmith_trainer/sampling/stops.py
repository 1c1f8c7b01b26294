"""The end of a sequence: a token ID, or a string in the decoded text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tinsmith_trainer.sampling.base import SamplingParams
from tinsmith_trainer.sampling.token_text import IncrementalText, Tokens


@dataclass(frozen=True, slots=True)
class StopRule:
    """The stops of a job.

    The stop IDs of a request replace the model's end-of-sequence IDs. Stop strings are added to the end-of-sequence
    IDs. Renderers for base models stop at the next speaker's name, and also accept an end-of-sequence token. A client
    that stops at a bracket could not parse an answer that continues after the end-of-sequence token. If all lists are
    empty, nothing stops a sequence.
    """

    token_ids: frozenset[int]
    strings: tuple[str, ...]

    @classmethod
    def of(cls, params: SamplingParams, eos_token_ids: Sequence[int]) -> StopRule:
        listed, strings = frozenset(params.stop_tokens or ()), params.stop_strings or ()
        unset = params.stop_tokens is None and params.stop_strings is None
        return cls(frozenset(eos_token_ids) if unset or (strings and not listed) else listed, strings)

    def watch(self, tokenizer: Any, prompt: Tokens) -> StopWatch:
        return StopWatch(self, tokenizer, prompt)


class StopWatch:
    """A check of one sequence, which looks for a stop at each drawn token."""

    def __init__(self, rule: StopRule, tokenizer: Any, prompt: Tokens) -> None:
        self._token_ids = rule.token_ids
        self._strings = rule.strings
        self._keep = max((len(string) for string in rule.strings), default=1) - 1
        self._text = IncrementalText(tokenizer, prompt if rule.strings else ())
        self._tail = ""

    def sees_end(self, token: int) -> bool:
        """Check the next token. Return whether the token is a stop ID or completes a stop string."""
        if token in self._token_ids:
            return True
        if not self._strings:
            return False
        window = self._tail + self._text.push(token)
        self._tail = window[-self._keep :] if self._keep else ""
        return any(string in window for string in self._strings)


class StopCut:
    """A text in pieces that is cut at the first stop string, without hidden parts.

    The end of the text is held back while it may be the beginning of a stop string.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self.found = ""
        self._strings = strings
        self._held = ""
        self._hides: list[bool] = []  # one flag for each held character

    def push(self, piece: str, *, hidden: bool = False) -> str:
        if self.found:
            return ""
        self._held += piece
        self._hides += [hidden] * len(piece)
        starts = {start: string for string in self._strings if (start := self._held.find(string)) >= 0}
        if starts:
            first = min(starts)
            self.found = starts[first]
            return self._taken(first)
        kept = max((_overlap(self._held, string) for string in self._strings), default=0)
        return self._taken(len(self._held) - kept)

    def rest(self) -> str:
        """Return the text that was held back. Call this when no stop string can follow."""
        return "" if self.found else self._taken(len(self._held))

    def _taken(self, size: int) -> str:
        text, hides = self._held[:size], self._hides[:size]
        self._held, self._hides = self._held[size:], self._hides[size:]
        return "".join(one for one, hide in zip(text, hides, strict=True) if not hide) if any(hides) else text


def _overlap(text: str, string: str) -> int:
    """Return the number of characters at the end of the text that are also the beginning of the string."""
    most = min(len(text), len(string) - 1)
    return next((size for size in range(most, 0, -1) if string.startswith(text[len(text) - size :])), 0)
