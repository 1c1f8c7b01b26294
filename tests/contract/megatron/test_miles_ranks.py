"""Miles' ranks train what the PEFT engine trains, however they divide the model, and their states are any engine's.

Miles is a stand-in, and so are Megatron-Bridge's layers. The class that makes ranks of its actors, Megatron's layers,
its distributed optimizer and the exchanges between ranks are the real ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pytest
from support.engine.contract import CROSS_ENTROPY, IMPORTANCE_SAMPLING, compute_together, forward_backward, parity, spec
from support.engine.datums import policy_datum, sft_datum
from support.miles.ranks import GlooMilesRanks
from support.nemo_rl.engines import engine_over, in_process_engine
from support.tiny_models import tiny_model
from tinsmith_trainer.engines.base import AdamParams, Engine, Work
from tinsmith_trainer.engines.megatron.flags import MegatronSettings
from tinsmith_trainer.engines.megatron.parallelism import Parallelism
from tinsmith_trainer.engines.peft import PeftEngineSettings, build_peft_engine

MAX_RANK = 8
SETTINGS = MegatronSettings(numerics="fast", max_rank=MAX_RANK, token_budget=64)
LAYOUTS = {
    "data-3": Parallelism(3, distributed_optimizer=True),
    "tensor-2": Parallelism(2, tensor=2, distributed_optimizer=True),
    "pipeline-2": Parallelism(2, pipeline=2, distributed_optimizer=True),
}
SFT = [sft_datum(length, seed) for seed, length in enumerate((5, 20, 12))]
POLICY = [policy_datum(length, seed) for seed, length in enumerate((7, 19))]
SHARED = [Work("a", SFT[:2], CROSS_ENTROPY), Work("b", POLICY, IMPORTANCE_SAMPLING)]


class Sides(NamedTuple):
    engine: Engine
    peft: Engine


@pytest.fixture(params=list(LAYOUTS))
def sides(request: pytest.FixtureRequest) -> Iterator[Sides]:
    ranks = GlooMilesRanks(tiny_model(), SETTINGS, LAYOUTS[request.param])
    yield Sides(
        engine_over(ranks, tiny_model(), SETTINGS),
        build_peft_engine(tiny_model(), PeftEngineSettings(max_rank=MAX_RANK)),
    )
    ranks.close()


@pytest.mark.timeout(300)
def test_two_adapters_train_as_on_the_peft_engine_and_continue_on_the_others(sides: Sides) -> None:
    """One adapter has a rank that tensor ranks do not share evenly; fewer datums than data ranks; one clip.

    Two calls of both adapters share a forward.
    """
    for each in sides:
        for adapter, rank in (("a", 3), ("b", 8)):
            each.create_adapter(adapter, spec(each, rank=rank))
    for step in range(3):
        for adapter in ("a", "b"):
            measured, reference = (trained(each, adapter, step) for each in sides)
            for mine, other in zip(measured, reference, strict=True):
                assert mine == pytest.approx(other, rel=1e-3, abs=1e-3)
    for each in sides:
        compute_together(each, SHARED)
    assert_close(sides.engine, "a", sides.peft)
    assert_close(sides.engine, "b", sides.peft)

    nemo_rl = in_process_engine(SETTINGS)
    nemo_rl.load_state("a", sides.engine.state("a"), with_optimizer=True)
    sides.engine.load_state("b", sides.peft.state("a"), with_optimizer=True)
    for engine, adapter in ((nemo_rl, "a"), (sides.engine, "b"), (sides.peft, "a")):
        trained(engine, adapter, step=3)
    assert_close(nemo_rl, "a", sides.peft)
    sides.engine.load_state("a", nemo_rl.state("a"), with_optimizer=True)
    for engine in (sides.engine, sides.peft):
        trained(engine, "a", step=4)
    assert_close(sides.engine, "a", sides.peft)

    trained(sides.engine, "b", step=4)
    sides.peft.load_state("b", sides.engine.state("b"), with_optimizer=True)
    for name, values in sides.peft.state("b").tensors.items():
        np.testing.assert_allclose(values, sides.peft.state("a").tensors[name], rtol=1e-3, atol=1e-4, err_msg=name)


def trained(engine: Engine, adapter: str, step: int) -> list[dict[str, float]]:
    """Two calls of different losses and sizes, and a step."""
    params = AdamParams(learning_rate=1e-3 * (step + 1), eps=1e-3, grad_clip_norm=0.5)
    outcomes = [
        forward_backward(engine, SFT, adapter=adapter),
        forward_backward(engine, POLICY, adapter=adapter, loss=IMPORTANCE_SAMPLING),
    ]
    return [*(dict(outcome.metrics) for outcome in outcomes), engine.optim_step(adapter, params)]


def assert_close(engine: Engine, adapter: str, peft: Engine) -> None:
    measured, reference = engine.state(adapter).tensors, peft.state(adapter).tensors
    assert measured.keys() == reference.keys()
    for name, values in reference.items():
        np.testing.assert_allclose(measured[name], values, rtol=1e-3, atol=1e-4, err_msg=name)


@pytest.mark.timeout(300)
def test_ranks_that_ray_places_on_gpus_agree_with_the_peft_engine() -> None:
    """Ray is the real one, and believes that this machine has GPUs: what `--gpus-per-node 2` starts, but for Miles."""
    parity("peft", "support.miles.on_ray:build", atol=1e-4)
