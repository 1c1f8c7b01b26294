"""Miles' own actors over Ray, however they divide the work, train as the PEFT engine does."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from support.engine.contract import state_bits
from support.nemo_rl.engines import engine_over
from support.nemo_rl.peft_comparison import Apart, trained_apart
from support.real_runs import Note
from support.tiny_models import tiny_model
from tinsmith_trainer.engines.megatron.factory import RanksRequest
from tinsmith_trainer.engines.megatron.flags import MegatronSettings, RankPlacement, RankRecompute
from tinsmith_trainer.engines.megatron.parallelism import Parallelism
from tinsmith_trainer.engines.megatron.rank_group import RanksLost
from tinsmith_trainer.engines.megatron.ray_ranks import RayRanks
from tinsmith_trainer.engines.miles.group import start_miles_ranks
from tinsmith_trainer.engines.peft import PeftEngineSettings, build_peft_engine
from tinsmith_trainer.torch_model.loading import TorchModel, load_torch_model
from tinsmith_trainer.torch_model.tiny_model import Family


@contextmanager
def real_ranks(model: TorchModel, parallelism: Parallelism, settings: MegatronSettings) -> Iterator[RayRanks]:
    """Start ranks as the worker does where there are GPUs, on a Ray that is configured with GPUs."""
    wanted = RankPlacement(
        parallelism, in_process=False, nodes=1, gpus_per_node=parallelism.world_size, ray_address=None
    )
    made, _ = start_miles_ranks(RanksRequest(model.directory, model.info, wanted, settings))
    try:
        yield made
    finally:
        made.close()


def in_bfloat16(model: TorchModel, folder: Path) -> TorchModel:
    """Return the same model with a configuration in bfloat16; loaded here in float32."""
    copied = shutil.copytree(model.directory, folder / "bfloat16")
    config = copied / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "dtype": "bfloat16"}))
    return load_torch_model(str(copied), dtype=torch.float32)


pytestmark = [pytest.mark.miles, pytest.mark.timeout(1800)]

MAX_RANK = 8
SETTINGS = MegatronSettings(max_rank=MAX_RANK, token_budget=64)
FLOAT32 = Apart(logprob=1e-5, norm=1e-4, weight=1e-5)
BFLOAT16 = Apart(logprob=5e-2, norm=5e-2, weight=5e-3)
"""The difference from the PEFT engine in float32: the rounding of a base in bfloat16, which GPUs have."""


def divided(world_size: int, **dimensions: int) -> Parallelism:
    """Miles knows no other optimizer than the distributed one."""
    return Parallelism(world_size, distributed_optimizer=True, **dimensions)


class Layout(NamedTuple):
    family: Family
    parallelism: Parallelism
    recompute: RankRecompute = "none"


LAYOUTS = {
    "Qwen3, one rank": Layout("qwen3", divided(1)),
    "Qwen3, one rank, layers computed anew": Layout("qwen3", divided(1), "layers"),
    "Qwen3, one rank, feed-forward computed anew": Layout("qwen3", divided(1), "mlp"),
    "Qwen3, tensor 2 with sequence parallelism": Layout("qwen3", divided(2, tensor=2)),
    "Qwen3, pipeline 2": Layout("qwen3", divided(2, pipeline=2)),
    "Qwen3, data 2": Layout("qwen3", divided(2)),
    "Qwen3, data 3": Layout("qwen3", divided(3)),
    "Llama, one rank": Layout("llama3", divided(1)),
    "Llama, tensor 2 with data 2": Layout("llama3", divided(4, tensor=2)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_train_two_adapters_as_the_peft_engine_does_and_take_a_state_back(layout: str, note: Note) -> None:
    apart = apart_from_peft(tiny_model(LAYOUTS[layout].family), LAYOUTS[layout])
    assert apart.within(FLOAT32), apart
    note(f"{layout}, float32", str(FLOAT32), str(apart))


def test_a_rank_in_bfloat16_trains_within_the_rounding_of_bfloat16(tmp_path: Path, note: Note) -> None:
    apart = apart_from_peft(in_bfloat16(tiny_model(), tmp_path), LAYOUTS["Qwen3, one rank"])
    assert apart.within(BFLOAT16), apart
    note("Qwen3, one rank, bfloat16 as on GPUs", str(BFLOAT16), str(apart))


def test_stages_in_bfloat16_train_within_the_rounding_of_bfloat16(tmp_path: Path, note: Note) -> None:
    apart = apart_from_peft(in_bfloat16(tiny_model(), tmp_path), LAYOUTS["Qwen3, pipeline 2"])
    assert apart.within(BFLOAT16), apart
    note("Qwen3, pipeline 2, bfloat16 as on GPUs", str(BFLOAT16), str(apart))


def test_a_rank_that_is_killed_is_missed_by_the_watch_and_by_the_next_call(
    monkeypatch: pytest.MonkeyPatch, note: Note
) -> None:
    import ray
    from tinsmith_trainer.engines.megatron import ray_ranks

    def process(_rank: Any) -> int:
        return os.getpid()

    missed = threading.Event()
    monkeypatch.setattr(ray_ranks, "RankWatch", partial(ray_ranks.RankWatch, on_lost=missed.set))
    with real_ranks(tiny_model(), divided(2), SETTINGS) as ranks:
        victim = ranks._places.actors[-1]
        os.kill(ray.get(victim.__ray_call__.remote(process)), signal.SIGKILL)
        assert missed.wait(timeout=30)
        with pytest.raises(RanksLost):
            ranks.all("ts_parts")
    note("Qwen3, data 2: a rank that is killed is missed", "noticed", "noticed")


def apart_from_peft(model: TorchModel, layout: Layout) -> Apart:
    settings = replace(SETTINGS, recompute=layout.recompute)
    with real_ranks(model, layout.parallelism, settings) as ranks:
        engine = engine_over(ranks, model, settings)
        apart = trained_apart(engine, build_peft_engine(model, PeftEngineSettings(max_rank=MAX_RANK)))
        state = engine.state("a")
        engine.drop("a")
        engine.load_state("a", state, True)
        assert state_bits(engine.state("a")) == state_bits(state)
        return apart
