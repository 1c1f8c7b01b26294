"""A mixture's experts, however ranks share them, train as the PEFT engine's, and in its layout."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from safetensors.numpy import load_file
from support.engine.contract import IMPORTANCE_SAMPLING, forward_backward, spec, state_bits
from support.engine.datums import policy_datum, sft_datum
from support.nemo_rl.engines import engine_over
from support.nemo_rl.gloo_group import GlooGroup
from support.tiny_models import tiny_model
from tinsmith_trainer.engines.base import AdamParams, AdapterState, Engine, LoraSpec
from tinsmith_trainer.engines.megatron.flags import MegatronSettings
from tinsmith_trainer.engines.megatron.local_rank import RankModel
from tinsmith_trainer.engines.megatron.parallelism import Parallelism
from tinsmith_trainer.engines.peft import PeftEngineSettings, build_peft_engine

MAX_RANK = 8
LAYOUTS = {
    "one": Parallelism(),
    "expert-2-data-4-distributed-optimizer": Parallelism(4, expert=2, distributed_optimizer=True),
    "expert-2-pipeline-2": Parallelism(4, pipeline=2, expert=2),
}
SFT = [sft_datum(length, seed) for seed, length in enumerate((5, 20, 12, 33, 7))]
POLICY = [policy_datum(length, seed) for seed, length in enumerate((7, 19, 4))]
STEPS = (
    AdamParams(learning_rate=1e-3, eps=1e-3),
    AdamParams(learning_rate=2e-3, beta1=0.5, beta2=0.99, eps=1e-3, weight_decay=0.1, grad_clip_norm=0.5),
)
EXPERTS_ALONE = LoraSpec(rank=3, alpha=16.0, seed=5, train_attn=False, train_unembed=False)


class Sides(NamedTuple):
    engine: Engine
    peft: Engine


@pytest.fixture(params=list(LAYOUTS), scope="module")
def sides(request: pytest.FixtureRequest) -> Iterator[Sides]:
    """Each with adapters `a` and `b`, of another rank and other modules, after steps in turn."""
    model = tiny_model("qwen3-moe")
    ranks = GlooGroup(RankModel(model.directory, LAYOUTS[request.param], MAX_RANK))
    engine = engine_over(ranks, model, MegatronSettings(max_rank=MAX_RANK, token_budget=64))
    sides = Sides(engine, build_peft_engine(model, PeftEngineSettings(max_rank=MAX_RANK)))
    told = [run_steps(each) for each in sides]
    for measured, reference in zip(*told, strict=True):
        assert measured == pytest.approx(reference, rel=1e-3, abs=1e-3)
    yield sides
    ranks.close()


def run_steps(engine: Engine) -> list[dict[str, float]]:
    """Run calls and steps, with an accumulation open while the other adapter computes, and return their results."""
    engine.create_adapter("a", spec(engine))
    engine.create_adapter("b", EXPERTS_ALONE)
    told: list[dict[str, float]] = []
    for params in STEPS:
        told += [dict(forward_backward(engine, SFT, adapter=adapter).metrics) for adapter in ("a", "b")]
        for adapter in ("a", "b"):
            told.append(dict(forward_backward(engine, POLICY, adapter=adapter, loss=IMPORTANCE_SAMPLING).metrics))
            told.append(engine.optim_step(adapter, params))
    return told


def assert_close(mine: AdapterState, reference: AdapterState) -> None:
    assert (mine.lora, mine.optimizer_step) == (reference.lora, reference.optimizer_step)
    assert mine.tensors.keys() == reference.tensors.keys()
    for name, values in mine.tensors.items():
        np.testing.assert_allclose(values, reference.tensors[name], rtol=1e-3, atol=1e-4, err_msg=name)


def test_experts_train_as_on_the_peft_engine(sides: Sides) -> None:
    for adapter in ("a", "b"):
        measured, reference = sides.engine.state(adapter), sides.peft.state(adapter)
        assert_close(measured, reference)
        moved = measured.tensors["weights/model.layers.0.mlp.experts.w2.lora_A"]
        assert moved.shape == (8, measured.lora.rank, 64)
        assert np.abs(measured.tensors["weights/model.layers.0.mlp.experts.w1.lora_B"]).max() > 1e-3


def test_a_checkpoint_of_either_engine_continues_on_the_other_and_has_the_same_files(
    sides: Sides, tmp_path: Path
) -> None:
    forward_backward(sides.engine, SFT)
    sides.peft.load_state("moved", sides.engine.state("a"), with_optimizer=True)
    sides.engine.load_state("b", sides.peft.state("moved"), with_optimizer=True)
    assert state_bits(sides.engine.state("b")) == state_bits(sides.engine.state("a"))
    for engine, adapter in ((sides.engine, "a"), (sides.peft, "moved")):
        forward_backward(engine, POLICY, adapter=adapter, loss=IMPORTANCE_SAMPLING)
        engine.optim_step(adapter, STEPS[0])
    assert_close(sides.engine.state("a"), sides.peft.state("moved"))
    exported = []
    for engine in sides:
        folder = tmp_path / type(engine).__name__
        folder.mkdir()
        engine.export(sides.engine.state("a"), folder, "peft")
        exported.append(load_file(folder / "adapter_model.safetensors"))
    measured, reference = exported
    assert measured.keys() == reference.keys()
    assert all(np.array_equal(values, reference[name]) for name, values in measured.items())
