"""News for a client about its ended samples: each at least once, and none without end."""

from __future__ import annotations

import pytest
from tinsmith_trainer.sampling import ended_samples
from tinsmith_trainer.sampling.ended_samples import REPEAT_SECONDS, EndedSamples, SampleClient

CLIENT = SampleClient("s:sample:0", 0)


def sample(number: int, session: str = "s:sample:0") -> str:
    return f"{session}:asample:{number}@0a0a0a0a"


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


async def test_an_ended_sample_is_reported_until_its_client_has_seen_the_round() -> None:
    ended = EndedSamples()
    ended.note(sample(0))
    told, first = ended.report(CLIENT, 0, 100)
    again, second = ended.report(CLIENT, 0, 101)
    assert (told, again, first < second) == ([sample(0)], [sample(0)], True)
    assert ended.report(CLIENT, second, 102)[0] == []
    assert not await ended.any(CLIENT, second, 0)


def test_a_sample_that_ends_after_a_round_is_in_a_round_that_its_client_has_not_seen() -> None:
    """Even where an answer on its way was overtaken: its round was chosen before."""
    ended = EndedSamples()
    _, newer = ended.report(CLIENT, 0, 200)
    ended.note(sample(0))
    _, older = ended.report(CLIENT, 0, 150)
    assert older > newer
    assert ended.report(CLIENT, newer, 201)[0] == [sample(0)]


def test_no_client_moves_the_rounds_of_another_however_far_its_cursor_says_it_is() -> None:
    ended = EndedSamples()
    ended.note(sample(0))
    assert ended.report(SampleClient("other:sample:0", 0), 2**62 - 1, 2**62) == ([], 2**62)
    assert ended.report(CLIENT, 0, 100) == ([sample(0)], 100)


def test_rounds_of_former_clients_are_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ended_samples, "ROUNDS_KEPT", 2)
    ended = EndedSamples()
    for number in range(3):
        ended.report(SampleClient("s:sample:0", number), 0, 100)
    assert [ended.report(SampleClient("s:sample:0", number), 0, 50)[1] for number in (2, 0)] == [101, 50]


def test_clients_that_share_a_sampling_session_hear_of_their_own_samples() -> None:
    ended = EndedSamples()
    for number in (5, 10**9, 7 * 10**9 + 3, 999_999_999):
        ended.note(sample(number))
    ended.note(sample(1, session="other:sample:0"))
    for client, numbers in ((0, [5, 999_999_999]), (1, [10**9]), (7, [7 * 10**9 + 3]), (2, [])):
        told, _ = ended.report(SampleClient("s:sample:0", client), 0, 1)
        assert told == [sample(number) for number in numbers]


def test_a_sample_that_was_seen_and_not_fetched_is_reported_again_after_a_minute() -> None:
    clock = Clock()
    ended = EndedSamples(clock)
    ended.note(sample(0))
    _, round = ended.report(CLIENT, 0, 1)
    assert ended.report(CLIENT, round, round + 1)[0] == []
    clock.now += REPEAT_SECONDS + 1
    assert ended.report(CLIENT, round, round + 2)[0] == [sample(0)]


def test_a_lost_sample_is_forgotten_when_its_client_has_heard_of_it() -> None:
    clock = Clock()
    ended = EndedSamples(clock)
    ended.note_lost(sample(0))
    told, round = ended.report(CLIENT, 0, 1)
    assert told == [sample(0)]
    clock.now += REPEAT_SECONDS + 1
    assert ended.report(CLIENT, round, round + 1)[0] == []


def test_lost_samples_that_are_not_polled_are_dropped_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ended_samples, "MOST_LOST", 2)
    ended = EndedSamples()
    for number in range(4):
        ended.note_lost(sample(number))
    assert ended.report(CLIENT, 0, 1)[0] == [sample(2), sample(3)]
