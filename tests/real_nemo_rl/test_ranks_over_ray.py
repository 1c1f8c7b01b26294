"""The real `Policy` on the real `RayVirtualCluster`, however ranks divide the work, trains as the PEFT engine does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from support.nemo_rl.engines import engine_over
from support.nemo_rl.peft_comparison import Apart, trained_apart
from support.nemo_rl.real_workers import real_ranks
from support.tiny_models import tiny_model
from tinsmith_trainer.engines.megatron.flags import MegatronSettings, RankRecompute
from tinsmith_trainer.engines.megatron.parallelism import Parallelism
from tinsmith_trainer.engines.peft import PeftEngineSettings, build_peft_engine
from tinsmith_trainer.torch_model.tiny_model import Family

pytestmark = [pytest.mark.nemo_rl, pytest.mark.timeout(1800)]

MAX_RANK = 8
SETTINGS = MegatronSettings(max_rank=MAX_RANK, token_budget=64)
FLOAT32 = Apart(logprob=1e-5, norm=1e-4, weight=1e-5)
BFLOAT16 = Apart(logprob=5e-2, norm=5e-2, weight=5e-3)
"""The difference from the PEFT engine in float32: the rounding of a base in bfloat16, which GPUs have."""


class Layout(NamedTuple):
    family: Family
    parallelism: Parallelism
    recompute: RankRecompute = "none"


LAYOUTS = {
    "one rank": Layout("llama3", Parallelism(1)),
    "one rank, layers computed anew": Layout("llama3", Parallelism(1), "layers"),
    "tensor 2 with sequence parallelism": Layout("llama3", Parallelism(2, tensor=2)),
    "pipeline 2": Layout("llama3", Parallelism(2, pipeline=2)),
    "data 2": Layout("llama3", Parallelism(2)),
    "context 2": Layout("llama3", Parallelism(2, context=2)),
    "Qwen3, one rank": Layout("qwen3", Parallelism(1)),
    "Qwen3, data 2 with the optimizer distributed": Layout("qwen3", Parallelism(2, distributed_optimizer=True)),
    "Qwen3-MoE, expert 2": Layout("qwen3-moe", Parallelism(2, expert=2)),
    "Qwen3-MoE, expert 2, layers computed anew": Layout("qwen3-moe", Parallelism(2, expert=2), "layers"),
    "Qwen3-MoE, expert 2, experts computed anew": Layout("qwen3-moe", Parallelism(2, expert=2), "mlp"),
    "Qwen3-MoE, tensor 2 with expert 2": Layout("qwen3-moe", Parallelism(2, tensor=2, expert=2)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_train_two_adapters_as_the_peft_engine_does(layout: str, note: Any) -> None:
    apart = _apart(LAYOUTS[layout], float32=True)
    assert apart.within(FLOAT32), apart
    note(f"`Policy` over Ray, {layout}, float32", str(FLOAT32), str(apart))


def test_a_rank_in_bfloat16_trains_within_the_rounding_of_bfloat16(note: Any) -> None:
    apart = _apart(LAYOUTS["one rank"], float32=False)
    assert apart.within(BFLOAT16), apart
    note("`Policy` over Ray, one rank, bfloat16 as on GPUs", str(BFLOAT16), str(apart))


def _apart(layout: Layout, *, float32: bool) -> Apart:
    model = tiny_model(layout.family, dtype=torch.float32)
    settings = replace(SETTINGS, recompute=layout.recompute)
    with real_ranks(model, layout.parallelism, settings, float32=float32) as ranks:
        peft = build_peft_engine(model, PeftEngineSettings(max_rank=MAX_RANK))
        return trained_apart(engine_over(ranks, model, settings), peft)
