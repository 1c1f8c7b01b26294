"""The time to wait for ranks: as long as they compute, but not for one that waits in vain for another."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from ray.exceptions import ActorDiedError, RaySystemError, RayTaskError
from tinsmith_trainer.engines.megatron import ray_ranks
from tinsmith_trainer.engines.megatron.rank_group import Answer, RanksLost
from tinsmith_trainer.engines.megatron.ray_ranks import GRACE_SECONDS, collect, start_error
from tinsmith_trainer.errors import ModelDirectoryInvalid, ServerError

FAILED = Answer(fault="computation", message="out of memory")
NEVER = float("inf")


class Calls:
    """Stands for Ray: each call by its number, answered at its second of a clock that runs only while one waits."""

    def __init__(self, answers: Sequence[tuple[float, Answer | Exception]]) -> None:
        self.answers = answers
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def wait(self, calls: list[int], *, num_returns: int, timeout: float | None) -> tuple[list[int], list[int]]:
        assert num_returns == 1
        first = min(calls, key=lambda call: self.answers[call][0])
        answered_at = max(self.now, self.answers[first][0])
        if timeout is not None and answered_at > self.now + timeout:
            self.now += timeout
            return [], calls
        assert answered_at < NEVER, "the wait never ends"
        self.now = answered_at
        return [first], [call for call in calls if call != first]

    def get(self, call: int) -> Answer:
        answer = self.answers[call][1]
        if isinstance(answer, Exception):
            raise answer
        return answer


Start = Callable[..., Calls]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Start:
    def start(*answers: tuple[float, Answer | Exception]) -> Calls:
        calls = Calls(answers)
        monkeypatch.setattr(ray_ranks, "ray", calls)
        monkeypatch.setattr(ray_ranks, "time", calls)
        return calls

    return start


def test_answers_come_by_rank_however_long_a_rank_computes(start: Start) -> None:
    start((3600.0, Answer(0)), (1.0, Answer(1)))
    assert collect([0, 1]) == [Answer(0), Answer(1)]


def test_ranks_that_wait_for_a_failed_rank_are_lost_after_a_grace_period(start: Start) -> None:
    calls = start((NEVER, Answer()), (5.0, FAILED), (7.0, Answer()))
    with pytest.raises(RanksLost, match="1 of 3 ranks do not answer because another one failed: out of memory"):
        collect([0, 1, 2])
    assert calls.now == 5.0 + GRACE_SECONDS


def test_ranks_that_fail_one_after_the_other_are_all_heard_and_waited_for_once(start: Start) -> None:
    start((5.0, FAILED), (5.0 + GRACE_SECONDS, FAILED))
    assert collect([0, 1]) == [FAILED, FAILED]

    start((5.0, FAILED), (6.0, FAILED), (5.5 + GRACE_SECONDS, FAILED))
    with pytest.raises(RanksLost):
        collect([0, 1, 2])


def test_a_rank_that_stays_silent_after_the_answers_of_the_others_is_lost_at_the_limit(start: Start) -> None:
    """A stopped rank is not dead. Ranks with separate data do not wait for each other in a forward."""
    calls = start((5.0, Answer()), (NEVER, Answer()), (500.0, Answer()))
    with pytest.raises(RanksLost, match=r"ranks \[1\] of 3 have not answered for 600 s after the first answer"):
        collect([0, 1, 2], late_seconds=600.0)
    assert calls.now == 605.0


def test_a_rank_that_died_is_noticed_while_the_others_compute(start: Start) -> None:
    calls = start((NEVER, Answer()), (5.0, ActorDiedError()))
    with pytest.raises(RanksLost, match="A rank is gone"):
        collect([0, 1])
    assert calls.now == 5.0


def test_a_failed_start_is_reported_in_one_line_or_with_the_error_of_a_rank() -> None:
    died = start_error(RaySystemError("the head does not answer\n  File 'x', line 1"))
    assert isinstance(died, ServerError)
    assert str(died) == "The ranks did not start: System error: the head does not answer"
    own = ModelDirectoryInvalid("model.safetensors is truncated")
    assert start_error(RayTaskError("join", "a traceback", own)) is own
    assert str(start_error(None)) == "The ranks did not start: some failed, and others waited for them"
