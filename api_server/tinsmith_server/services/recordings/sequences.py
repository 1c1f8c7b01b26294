"""The sequences of a recording: the path of turns from the first prompt of a conversation to each last answer.

Sequences may share turns, for example after a repeated request. Each drawn token must be trained only once, so it has
mask 1 in only one sequence: the one with the most turns, because the agent continued there.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator, Sequence
from typing import TypeVar

from tinsmith_server.services.recordings.histories import History
from tinsmith_server.store.records import RecordedTurn
from tinsmith_server.wire.responses import RecordedSegment, RecordedSequence

N = TypeVar("N", int, float)


def sequences_of(turns: Sequence[RecordedTurn]) -> Iterator[RecordedSequence]:
    """Yield the sequences in the order of their last turns."""
    history = History(turns)
    parents = {turn.parent for turn in turns}
    paths = {turn.number: history.path(turn.number) for turn in turns if turn.number not in parents}
    owners: dict[int, int] = {}
    for last, path in sorted(paths.items(), key=lambda one: (-len(one[1]), one[0])):
        for turn in path:
            owners.setdefault(turn.number, last)
    longest = _longest_answers(turns, {number: len(paths[last]) for number, last in owners.items()})
    for last, path in paths.items():
        own = [owners[turn.number] == last for turn in path]
        is_abandoned = len(path) < longest[_prompt(path[own.index(True)])]
        yield _sequence(path, own, is_abandoned=is_abandoned)


def _longest_answers(turns: Sequence[RecordedTurn], lengths: dict[int, int]) -> dict[tuple[int | None, bytes], int]:
    """Return for each prompt the number of turns in the longest sequence that continues an answer to the prompt."""
    longest: dict[tuple[int | None, bytes], int] = {}
    for turn in turns:
        longest[_prompt(turn)] = max(longest.get(_prompt(turn), 0), lengths[turn.number])
    return longest


def _prompt(turn: RecordedTurn) -> tuple[int | None, bytes]:
    return turn.parent, turn.prompt_tokens


def _sequence(path: Sequence[RecordedTurn], own: Sequence[bool], *, is_abandoned: bool) -> RecordedSequence:
    tokens, logprobs, mask = array("i"), array("f"), array("b")
    segments = []
    for turn, is_own in zip(path, own, strict=True):
        prompt, sampled = _ints(turn.prompt_tokens), _ints(turn.sampled_tokens)
        start, end = len(tokens) + len(prompt), len(tokens) + len(prompt) + len(sampled)
        tokens.extend(prompt)
        tokens.extend(sampled)
        logprobs.extend([0.0] * len(prompt))
        logprobs.extend(_floats(turn.logprobs))
        mask.extend([0] * len(prompt) + [int(is_own)] * len(sampled))
        segments.append(_segment(turn, start, end))
    return RecordedSequence.model_construct(
        sequence=path[-1].number,
        reason=next((turn.reason for turn in path[::-1] if turn.reason != "extends"), path[0].reason),
        abandoned=is_abandoned,
        tokens=tokens.tolist(),
        logprobs=logprobs.tolist(),
        mask=mask.tolist(),
        segments=segments,
    )


def _segment(turn: RecordedTurn, start: int, end: int) -> RecordedSegment:
    return RecordedSegment(
        turn=turn.number,
        start=start,
        end=end,
        reason=turn.reason,
        model_path=turn.model_path,
        weights_digest=turn.weights_digest,
        finish_reason=turn.finish_reason,
        sampling_params=dict(turn.sampling),
        started_at=turn.started_at,
        ended_at=turn.ended_at,
    )


def _ints(content: bytes) -> array[int]:
    return _unpacked(array("i"), content)


def _floats(content: bytes) -> array[float]:
    return _unpacked(array("f"), content)


def _unpacked(numbers: array[N], content: bytes) -> array[N]:
    numbers.frombytes(content)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers
