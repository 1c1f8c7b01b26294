"""The rank launcher that the tests of Megatron stand on."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed
from support.nemo_rl.gloo import GlooRanks, RankDied, RanksHang, RankTraceback, run_on_ranks


@pytest.fixture
def pair() -> Iterator[GlooRanks]:
    with GlooRanks(2) as ranks:
        yield ranks


def _sum_of_ranks(offset: float) -> tuple[int, torch.Tensor]:
    total = torch.tensor([torch.distributed.get_rank() + offset])
    torch.distributed.all_reduce(total)
    return torch.distributed.get_rank(), total


def _fail_alike() -> None:
    raise ValueError("no such layer")


def _fail_on_rank_1() -> None:
    if torch.distributed.get_rank() == 1:
        raise ValueError("no such layer")
    torch.distributed.barrier()


def _wait_for_ever_on_rank_0() -> None:
    while torch.distributed.get_rank() == 0:
        time.sleep(1)


def _end_on_rank_1() -> None:
    if torch.distributed.get_rank() == 1:
        os._exit(7)
    torch.distributed.barrier()


def test_ranks_reduce_with_each_other_and_answer_in_order(pair: GlooRanks) -> None:
    assert pair.run(_sum_of_ranks, 0.5) == [(0, torch.tensor([2.0])), (1, torch.tensor([2.0]))]
    assert [rank for rank, _ in pair.run_each(_sum_of_ranks, [(1.0,), (2.0,)])] == [0, 1]


def test_an_error_on_all_ranks_is_raised_with_its_place_and_the_ranks_stay(pair: GlooRanks) -> None:
    with pytest.raises(ValueError, match="no such layer") as raised:
        pair.run(_fail_alike)
    assert isinstance(raised.value.__cause__, RankTraceback)
    assert "_fail_alike" in str(raised.value.__cause__)
    assert len(pair.run(_sum_of_ranks, 0.0)) == 2


def test_an_error_on_one_rank_ends_those_that_wait_for_it() -> None:
    with pytest.raises(ValueError, match="no such layer"):
        run_on_ranks(2, _fail_on_rank_1)


def test_ranks_that_hang_are_killed_at_the_deadline(pair: GlooRanks) -> None:
    pair.run(_sum_of_ranks, 0.0)  # what a first call has to import is not of the hang
    with pytest.raises(RanksHang, match=r"Ranks \[0\] of 2 did not answer within 20 s"):
        pair.run(_wait_for_ever_on_rank_0, timeout_seconds=20)


def test_a_rank_that_ends_is_told_with_its_exit_code(pair: GlooRanks) -> None:
    with pytest.raises(RankDied, match="Rank 1 of 2 ended with code 7"):
        pair.run(_end_on_rank_1)
