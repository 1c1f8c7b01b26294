"""Prompts that extend recorded tokens.

An agent sends the whole conversation with each request. Rendering an answer again may give other tokens than the tokens
that were drawn. So the prompt keeps the recorded tokens, and only the text after the last recorded answer is rendered.
To find this text, the answer is rendered with a mark, and the text after the mark is taken.

A chat template may also change earlier parts of the conversation when messages are added, for example by removing
reasoning. Then the recorded tokens cannot be extended.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tinsmith_rpc import worker_pb2

from tinsmith_trainer.errors import UserError

END_OF_REASONING = "</think>"
"""The text that ends a reasoning inside the content, if the model's message format is unknown."""

Message = Mapping[str, Any]
Render = Callable[[Sequence[Message], bool], str]
"""A function that renders messages; the flag requests the beginning of an answer after the messages."""


class CannotExtend(Exception):
    """The recorded tokens cannot be extended by this conversation."""

    def __init__(self, obstacle: worker_pb2.ExtensionObstacle.ValueType) -> None:
        super().__init__(worker_pb2.ExtensionObstacle.Name(obstacle))
        self.obstacle = obstacle


@dataclass(frozen=True, slots=True)
class Continuation:
    """The text after the recorded tokens.

    `text` begins with the text of the token `end`, which ends an answer. If `end_is_recorded`, the recorded tokens
    already have this token.
    """

    text: str
    end: int
    end_is_recorded: bool


def continuation(
    render: Render, messages: Sequence[Message], recorded: worker_pb2.RecordedTokens, ends: Mapping[int, str]
) -> Continuation:
    """Return the text after the recorded tokens of the first `recorded.messages` messages.

    `ends` has the text of each token that ends an answer. Raises CannotExtend, and UserError for messages of which the
    last recorded one is not an answer.
    """
    if not 2 <= recorded.messages <= len(messages) or messages[recorded.messages - 1].get("role") != "assistant":
        raise UserError(f"The {recorded.messages} recorded messages do not end with an answer of the conversation.")
    *history, answer = messages[: recorded.messages]
    mark, thought = uuid.uuid4().hex, uuid.uuid4().hex
    marked = _marked(answer, mark, thought)
    whole = render([*history, marked, *messages[recorded.messages :]], True)
    if thought in str(marked) and thought not in whole:
        raise CannotExtend(worker_pb2.REASONING_REMOVED)
    if not whole.startswith(render(history, False)) or mark not in whole:
        raise CannotExtend(worker_pb2.HISTORY_REWRITTEN)
    after, after_alone = whole.rpartition(mark)[2], render([*history, marked], False).rpartition(mark)[2]
    return _from_end(after, after_alone, recorded.last_token, ends)


def _from_end(after: str, after_alone: str, last_token: int, ends: Mapping[int, str]) -> Continuation:
    """Return the text from the first end of an answer.

    The text before the end belongs to the answer, so it is the same if no messages follow.
    """
    found = [(after.index(text), token) for token, text in ends.items() if text and text in after]
    if not found:
        raise CannotExtend(worker_pb2.ANSWER_NOT_CLOSED)
    place, end = min(found)
    is_recorded = last_token in ends
    if not after_alone.startswith(after[:place]) or (is_recorded and last_token != end):
        raise CannotExtend(worker_pb2.ANSWER_NOT_CLOSED)
    return Continuation(after[place:], end, is_recorded)


def _marked(answer: Message, mark: str, thought: str) -> Message:
    """Return the answer with a mark in its last part, and with another mark in its reasoning if it has any."""
    marked, content = dict(answer), str(answer.get("content") or "")
    if answer.get("reasoning_content"):
        marked["reasoning_content"] = f"{answer['reasoning_content']}{thought}"
    elif END_OF_REASONING in content:
        content = (thought + END_OF_REASONING).join(content.rsplit(END_OF_REASONING, 1))
    calls = list(answer.get("tool_calls") or ())
    if calls:
        function = calls[-1]["function"]
        calls[-1] = {
            **calls[-1],
            "function": {**function, "arguments": {**function["arguments"], mark: mark}},
        }
        marked["tool_calls"] = calls
    else:
        content += mark
    marked["content"] = content
    return marked
