"""The common answer of ranks: one value each, one error, or a lost group."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tinsmith_trainer.engines.megatron.rank_group import Answer, RanksFailed, RanksLost, agreed, attempt
from tinsmith_trainer.errors import UserError

FINE = Answer(value=1)
USER, COMPUTATION, LOST = (Answer(fault=fault, message="why") for fault in ("user", "computation", "lost"))  # type: ignore[arg-type]
answers = st.lists(st.sampled_from([FINE, USER, COMPUTATION, LOST]), min_size=1, max_size=4)


@given(answers)
def test_ranks_that_do_not_answer_alike_are_lost(given_answers: list[Answer]) -> None:
    kinds = {answer.fault for answer in given_answers}
    if kinds == {None}:
        assert agreed(given_answers) == [1] * len(given_answers)
        return
    alike = {frozenset({"user"}): UserError, frozenset({"computation"}): RanksFailed}
    with pytest.raises(alike.get(frozenset(kinds), RanksLost), match="why"):  # type: ignore[arg-type]
        agreed(given_answers)


def failing(error: Exception) -> Answer:
    def call() -> None:
        raise error

    return attempt(call)


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (UserError("the norm is inf"), "user"),
        (RuntimeError("shapes cannot be multiplied"), "computation"),
        (MemoryError(), "computation"),
        (torch.OutOfMemoryError("CUDA out of memory"), "computation"),
        (RuntimeError("[../gloo/transport/tcp/pair.cc] Connection closed by peer"), "lost"),
        (torch.distributed.DistBackendError("NCCL error"), "lost"),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), "lost"),
        (RanksLost("a step failed halfway"), "lost"),
    ],
)
def test_an_unrecoverable_error_loses_the_rank(error: Exception, fault: str) -> None:
    assert failing(error).fault == fault


def test_an_error_that_no_rank_should_raise_is_not_hidden() -> None:
    with pytest.raises(KeyError):
        failing(KeyError("a bug"))
