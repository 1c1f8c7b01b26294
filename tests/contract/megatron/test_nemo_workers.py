"""NeMo RL's workers, with Megatron-Bridge's way to divide an adapter, train what the PEFT engine trains.

The workers are stand-ins, and so is what NeMo RL does between a call and Megatron's schedule. The class that makes
ranks of them, the schedule, the layers, the optimizer and the exchanges between ranks are the real ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pytest
from structlog.testing import capture_logs
from support.engine.contract import CROSS_ENTROPY, IMPORTANCE_SAMPLING, compute_together, forward_backward, spec
from support.engine.datums import policy_datum, sft_datum
from support.nemo_rl.engines import engine_over
from support.nemo_rl.gloo_workers import GlooWorkers
from support.nemo_rl.one_worker import tiny_sizes
from support.tiny_models import tiny_model
from tinsmith_trainer.engines.base import AdamParams, Engine, Work
from tinsmith_trainer.engines.megatron.flags import MegatronSettings
from tinsmith_trainer.engines.megatron.parallelism import Parallelism
from tinsmith_trainer.engines.peft import PeftEngineSettings, build_peft_engine
from tinsmith_trainer.torch_model.tiny_model import Family

MAX_RANK = 8
LAYOUTS: dict[str, tuple[Family, Parallelism]] = {
    "tensor-2": ("qwen3", Parallelism(2, tensor=2)),
    "pipeline-2": ("qwen3", Parallelism(2, pipeline=2)),
    "experts-2": ("qwen3-moe", Parallelism(2, expert=2)),
}
SFT = [sft_datum(length, seed) for seed, length in enumerate((5, 20, 12))]
POLICY = [policy_datum(length, seed) for seed, length in enumerate((7, 19))]
SHARED = [Work("a", SFT[:2], CROSS_ENTROPY), Work("b", POLICY, IMPORTANCE_SAMPLING)]


class Sides(NamedTuple):
    engine: Engine
    peft: Engine


@pytest.fixture(params=list(LAYOUTS))
def sides(request: pytest.FixtureRequest) -> Iterator[Sides]:
    family, parallelism = LAYOUTS[request.param]
    model, workers = tiny_model(family), GlooWorkers(tiny_sizes(MAX_RANK, family), parallelism)
    with capture_logs() as logs:
        engine = engine_over(workers, model, MegatronSettings(numerics="fast", max_rank=MAX_RANK, token_budget=64))
    assert "datums are padded to rows of one length" not in {line["event"] for line in logs}
    yield Sides(engine, build_peft_engine(model, PeftEngineSettings(max_rank=MAX_RANK)))
    workers.close()


@pytest.mark.timeout(300)
def test_adapters_with_a_divided_a_matrix_train_as_on_the_peft_engine(sides: Sides) -> None:
    """An adapter of a rank that tensor ranks do not share evenly; two in turn; clipped by the norm over all ranks.

    Datums are packed. At the end calls of both adapters share a forward, except on ranks with experts.
    """
    engine, peft = sides
    for each in sides:
        for adapter, rank in (("a", 3), ("b", 8)):
            each.create_adapter(adapter, spec(each, rank=rank))
    for step in range(2):
        for adapter in ("a", "b"):
            params = AdamParams(learning_rate=1e-3 * (step + 1), eps=1e-3, grad_clip_norm=0.5)
            told = []
            for each in sides:
                outcomes = [
                    forward_backward(each, SFT, adapter=adapter),
                    forward_backward(each, POLICY, adapter=adapter, loss=IMPORTANCE_SAMPLING),
                ]
                told.append([*(dict(outcome.metrics) for outcome in outcomes), each.optim_step(adapter, params)])
            for measured, reference in zip(*told, strict=True):
                assert measured == pytest.approx(reference, rel=1e-3, abs=1e-3)
    for each in sides:
        compute_together(each, SHARED)
    for adapter in ("a", "b"):
        measured, reference = engine.state(adapter).tensors, peft.state(adapter).tensors
        assert measured.keys() == reference.keys()
        for name, values in reference.items():
            np.testing.assert_allclose(measured[name], values, rtol=1e-3, atol=1e-4, err_msg=name)
