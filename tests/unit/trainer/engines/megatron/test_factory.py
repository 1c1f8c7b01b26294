"""The log of the start of ranks, which takes from seconds to minutes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tinsmith_trainer.engines.megatron import factory
from tinsmith_trainer.engines.megatron.factory import RanksRequest, build_megatron_engine
from tinsmith_trainer.engines.megatron.flags import MegatronSettings, RankPlacement
from tinsmith_trainer.engines.megatron.parallelism import Parallelism
from tinsmith_trainer.engines.megatron.rank_group import RankGroup
from tinsmith_trainer.errors import ServerError
from tinsmith_trainer.torch_model.base_model import BaseModelInfo

INFO = BaseModelInfo("model", "Qwen3ForCausalLM", "revision", vocab_size=64, max_sequence_length=32)
WANTED = RankPlacement(Parallelism(4, tensor=2), in_process=False, nodes=1, gpus_per_node=0, ray_address="head:6379")

REQUEST = RanksRequest(Path("model"), INFO, WANTED, MegatronSettings())


def no_gpus(_request: RanksRequest) -> tuple[RankGroup, torch.dtype]:
    raise AssertionError("none were asked for")


class Log:
    """A replacement for the module's logger: structlog's filter depends on earlier tests in this process."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def info(self, event: str, **values: Any) -> None:
        self.lines.append({"event": event, **values})


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    log = Log()
    monkeypatch.setattr(factory, "log", log)
    return log


class NoRanks:
    parallelism = Parallelism()

    def all(self, method: str) -> list[Any]:
        return []


def test_the_log_has_a_line_before_ranks_start_and_one_after_with_the_seconds(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(factory, "_start_ranks", lambda *_: (NoRanks(), torch.float32))
    build_megatron_engine("nemo-rl", REQUEST, no_gpus)
    starting, ready = log.lines
    assert (starting["event"], starting["ranks"], starting["tensor"]) == ("starting ranks", 4, 2)
    assert starting["where"] == "Ray at head:6379"
    assert (ready["event"], ready["ranks"]) == ("ranks ready", 4)
    assert ready["seconds"] >= 0


def test_ranks_that_do_not_start_are_not_called_ready(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> NoRanks:
        raise ServerError("Ray at head:6379 does not answer")

    monkeypatch.setattr(factory, "_start_ranks", refuse)
    with pytest.raises(ServerError):
        build_megatron_engine("nemo-rl", REQUEST, no_gpus)
    assert [line["event"] for line in log.lines] == ["starting ranks"]
