from __future__ import annotations

import re
from dataclasses import replace
from datetime import timedelta

import pytest
from support.operator.resources import NOW
from tinsmith_operator.api.conditions import (
    LONGEST_MESSAGE,
    ConditionState,
    ConditionType,
    Finding,
    Truth,
    move_conditions,
)
from tinsmith_operator.api.reasons import Progress, Reason

LATER = NOW + timedelta(hours=1)


def ready(truth: Truth, reason: Reason, message: str = "So it is.") -> ConditionState:
    return ConditionState(ConditionType.READY, truth, Finding(reason, message))


def test_a_transition_time_moves_only_with_the_status() -> None:
    first = move_conditions((), [ready(Truth.FALSE, Reason.LOADING_MODEL)], generation=1, now=NOW)
    (again,) = move_conditions(first, [ready(Truth.FALSE, Reason.CRASH_LOOP)], generation=2, now=LATER)
    (turned,) = move_conditions((again,), [ready(Truth.TRUE, Reason.WORKER_READY)], generation=2, now=LATER)
    assert (again.last_transition_time, again.reason, again.observed_generation) == (NOW, "CrashLoop", 2)
    assert turned.last_transition_time == LATER


def test_a_transition_time_moves_too_when_something_begins_under_the_same_status() -> None:
    first = move_conditions((), [ready(Truth.FALSE, Reason.LOADING_MODEL)], generation=1, now=NOW)
    begins = replace(ready(Truth.FALSE, Reason.WAITING_FOR_CHECKPOINTS), begins=True)
    (moved,) = move_conditions(first, [begins], generation=1, now=LATER)
    assert moved.last_transition_time == LATER


def test_a_long_message_is_cut_where_the_crd_would_refuse_it() -> None:
    (condition,) = move_conditions((), [ready(Truth.FALSE, Reason.CRASH_LOOP, "x" * 9999)], generation=1, now=NOW)
    assert len(condition.message) == LONGEST_MESSAGE


@pytest.mark.parametrize("reason", Reason)
def test_every_reason_can_be_written_into_a_condition_and_is_explained(reason: Reason) -> None:
    assert re.fullmatch(r"[A-Z][A-Za-z]+", reason.value)
    assert reason.meaning.endswith(".")
    assert not reason.cure or reason.cure.endswith(".")


@pytest.mark.parametrize("reason", [reason for reason in Reason if reason.progress is Progress.STUCK])
def test_every_reason_that_needs_a_person_says_what_to_do(reason: Reason) -> None:
    assert reason.cure
