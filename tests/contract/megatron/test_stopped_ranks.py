"""A rank that is stopped, and so neither answers nor dies: the other ranks wait for a limited time."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from support.nemo_rl import gloo
from support.nemo_rl.gloo import GlooRanks
from tinsmith_trainer.engines.megatron.local_rank import RankModel, join_process_group
from tinsmith_trainer.engines.megatron.parallelism import Parallelism
from tinsmith_trainer.engines.megatron.rank_group import attempt

RANKS = 2
MODEL = RankModel(Path("unused"), Parallelism(RANKS), max_rank=8, wait_seconds=1.0)


def join_again(rank: int, store: str) -> int:
    """Join the group as a rank of the engine does, instead of the test's group. Return the process."""
    torch.distributed.destroy_process_group()
    join_process_group(torch.distributed.FileStore(store, RANKS), MODEL, rank)
    return os.getpid()


def add_up() -> float:
    total = torch.ones(1)
    torch.distributed.all_reduce(total)
    return float(total)


def test_a_stopped_rank_ends_the_wait_of_the_others_as_a_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss ends the worker's process, and the next process repeats the operation with new ranks."""
    monkeypatch.setattr(gloo, "GRACE_SECONDS", 0.1)
    with GlooRanks(RANKS) as ranks:
        pids = ranks.run_each(join_again, [(rank, str(tmp_path / "store")) for rank in range(RANKS)])
        assert ranks.run(add_up) == [2.0, 2.0]
        os.kill(pids[1], signal.SIGSTOP)
        answer = attempt(lambda: ranks.run(add_up))
    assert answer.fault == "lost"
    assert "Timed out waiting 1000ms" in answer.message
