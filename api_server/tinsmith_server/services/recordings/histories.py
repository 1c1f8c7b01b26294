"""The place of a request in a recording: which earlier turn the request extends, and why not another one.

Messages are compared by digests of their role, content, name and calls. Clients may drop an answer's reasoning, name
the answer, and assign other IDs to calls, so these are not compared. White space around an answer is not compared
either, because parsers of answers remove it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import orjson

from tinsmith_server.store.records import RecordedTurn

DIGEST_BYTES = 16

Message = Mapping[str, Any]
Reason = Literal[
    "first",
    "extends",
    "repeated",
    "new_conversation",
    "history_changed",
    "tools_changed",
    "reasoning_removed",
    "history_rewritten",
    "answer_not_closed",
    "completion",
]
"""The reason why a turn begins where it does.

`extends` and `repeated` continue an earlier turn, except that the first turn may be repeated, too. The other reasons
begin a new sequence: `history_changed` by the client, `tools_changed` also for variables of the chat template,
`reasoning_removed`, `history_rewritten` and `answer_not_closed` because of the chat template.
"""


@dataclass(frozen=True, slots=True)
class Conversation:
    """The messages of a request, the digest of each message with all messages before it, and that of the settings."""

    messages: Sequence[Message]
    digests: Sequence[bytes]
    settings: bytes

    @classmethod
    def of(cls, messages: Sequence[Message], tools: str, variables: str) -> Conversation:
        return cls(messages, _chain(b"", messages), _digest(orjson.dumps([tools, variables])))

    def digests_with(self, answer: Message) -> Sequence[bytes]:
        """Return the digests of the conversation with the answer."""
        return [*self.digests, *_chain(self.digests[-1], [answer])]


@dataclass(frozen=True, slots=True)
class Place:
    """The turn that a request extends, or None. `covered` is the number of messages that have recorded tokens."""

    parent: int | None
    reason: Reason
    covered: int = 0


@dataclass(frozen=True, slots=True)
class Recorded:
    """A recorded conversation: its length, and the digests of the first message, the question and the answer."""

    messages: int
    first: bytes
    question: bytes
    answer: bytes


class History:
    """The turns of one recording, as a tree."""

    def __init__(self, turns: Sequence[RecordedTurn]) -> None:
        """Read the turns. A turn follows its parent in the order of `turns`. A completion has no messages."""
        self._turns = {turn.number: turn for turn in turns}
        self._recorded: dict[int, Recorded] = {}
        for turn in turns:
            if own := _split(turn.message_digests):
                before = self._recorded.get(turn.parent) if turn.parent is not None else None
                first, question = (own[0], b"") if before is None else (before.first, before.answer)
                messages = len(own) + (0 if before is None else before.messages)
                self._recorded[turn.number] = Recorded(messages, first, [question, *own][-2], own[-1])

    def path(self, number: int | None) -> list[RecordedTurn]:
        """Return the turns from the first one to this turn."""
        found = []
        while number is not None:
            found.append(self._turns[number])
            number = self._turns[number].parent
        return found[::-1]

    def tokens(self, number: int | None) -> bytes:
        """Return the tokens from the first prompt to the end of this turn."""
        return b"".join(turn.prompt_tokens + turn.sampled_tokens for turn in self.path(number))

    def place(self, asked: Conversation) -> Place:
        """Return the longest recorded conversation that the request extends. The newest of equal ones counts."""
        covering = [number for number in self._covering(asked) if self._has_settings(number, asked)]
        if not covering:
            return Place(None, self._reason_without_parent(asked))
        parent = max(covering, key=lambda number: (self._recorded[number].messages, number))
        covered = self._recorded[parent].messages
        if self._reasoning_differs(parent, asked.messages):
            return Place(None, "history_changed")
        is_repeated = any(self._has_settings(number, asked) for number in self._answers(asked))
        return Place(parent, "repeated" if is_repeated else "extends", covered)

    def place_of_tokens(self, prompt: bytes) -> Place:
        """Return the longest recorded sequence that the prompt of a completion extends."""
        # Each turn is compared once: a comparison of whole paths took two seconds for 4,096 turns of one sequence.
        lengths: dict[int | None, int] = {None: 0}
        for number, turn in self._turns.items():
            own, start = turn.prompt_tokens + turn.sampled_tokens, lengths.get(turn.parent)
            if start is not None and prompt.startswith(own, start):
                lengths[number] = start + len(own)
        _, parent = max((length, -1 if number is None else number) for number, length in lengths.items())
        return Place(None, "completion") if parent < 0 else Place(parent, "extends")

    def with_reasoning(self, place: Place, messages: Sequence[Message]) -> list[Message]:
        """Return the messages with the recorded reasoning of each answer."""
        filled = list(messages)
        for turn in self.path(place.parent):
            if turn.reasoning:
                answer = self._recorded[turn.number].messages - 1
                filled[answer] = {**filled[answer], "reasoning_content": turn.reasoning.decode()}
        return filled

    def _reason_without_parent(self, asked: Conversation) -> Reason:
        if not self._turns:
            return "first"
        answers = self._answers(asked)
        if any(self._has_settings(number, asked) for number in answers):
            return "repeated"
        if answers or self._covering(asked):
            return "tools_changed"
        begins_equally = any(recorded.first == asked.digests[0] for recorded in self._recorded.values())
        return "history_changed" if begins_equally else "new_conversation"

    def _covering(self, asked: Conversation) -> list[int]:
        """Return the turns whose conversation begins the request, with any settings."""
        digests = dict(enumerate(asked.digests, start=1))
        return [number for number, known in self._recorded.items() if digests.get(known.messages) == known.answer]

    def _answers(self, asked: Conversation) -> list[int]:
        """Return the turns that answer the same messages, with any settings."""
        end = len(asked.digests) + 1, asked.digests[-1]
        return [number for number, known in self._recorded.items() if (known.messages, known.question) == end]

    def _has_settings(self, number: int, asked: Conversation) -> bool:
        return self._turns[number].settings_digest == asked.settings

    def _reasoning_differs(self, parent: int, messages: Sequence[Message]) -> bool:
        """Return whether the client has changed the reasoning of an answer. A missing reasoning is not a change."""
        for turn in self.path(parent):
            sent = messages[self._recorded[turn.number].messages - 1].get("reasoning_content")
            if sent and sent.strip() != turn.reasoning.decode().strip():
                return True
        return False


def own_digests(digests: Sequence[bytes], place: Place) -> bytes:
    """Return the digests that a turn stores: those of the messages that its parent does not cover."""
    return b"".join(digests[place.covered :])


def _split(digests: bytes) -> list[bytes]:
    return [digests[start : start + DIGEST_BYTES] for start in range(0, len(digests), DIGEST_BYTES)]


def _chain(before: bytes, messages: Iterable[Message]) -> list[bytes]:
    """Return the digest of each message together with the messages before it."""
    found = []
    for message in messages:
        before = _digest(before + orjson.dumps(_compared(message), option=orjson.OPT_SORT_KEYS))
        found.append(before)
    return found


def _compared(message: Message) -> list[Any]:
    role, content = message.get("role"), message.get("content") or ""
    if role != "assistant":
        return [role, content, message.get("name")]
    calls = [[call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls") or ()]
    return [role, content.strip(), calls]


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest()
