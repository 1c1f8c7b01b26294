"""What makes one of our ranks of Miles' actor, and what its model must have before Megatron wraps it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from support.engine.contract import forward_backward, spec
from support.engine.datums import sft_datum
from support.miles.ranks import CpuMilesRank, arguments_of, one_rank_engine, stand_in
from support.tiny_models import tiny_model
from tinsmith_trainer.engines.base import AdamParams
from tinsmith_trainer.engines.megatron.flags import MegatronSettings
from tinsmith_trainer.engines.megatron.parallelism import Parallelism
from tinsmith_trainer.engines.miles.rank import SummedLora, _precision, canonical_lora_in
from torch import nn

SETTINGS = MegatronSettings(adapter_slots=2, max_rank=8)


class Recording:
    def __init__(self) -> None:
        self.saved: Any = None

    def __call__(self, chunks: Any, training: bool) -> list[bool]:
        return [chunk.config.calculate_per_token_loss for chunk in chunks]

    def set_params_to_save(self, chunks: Any) -> None:
        self.saved = chunks


def chunk() -> Any:
    return SimpleNamespace(config=SimpleNamespace(calculate_per_token_loss=False))


def test_gradients_are_said_to_be_sums_before_adapters_are_placed() -> None:
    lora = SummedLora(Recording())
    assert lora([chunk(), chunk()]) == [True, True]


def test_miles_keeps_what_it_wants_to_save() -> None:
    inner = Recording()
    SummedLora(inner).set_params_to_save("chunks")  # type: ignore[arg-type]
    assert inner.saved == "chunks"


def test_only_models_built_inside_get_our_lora() -> None:
    with stand_in():
        from miles.backends.megatron_utils import lora_utils

        stock = lora_utils.create_lora_instance
        with canonical_lora_in(lora_utils):
            made = lora_utils.create_lora_instance(SimpleNamespace(target_modules=["linear_q"], lora_rank=8))
        assert isinstance(made, SummedLora)
        assert lora_utils.create_lora_instance is stock


def test_a_gradient_of_several_calls_makes_a_step() -> None:
    engine = one_rank_engine(SETTINGS)
    engine.create_adapter("a", spec(engine))
    for _ in range(2):
        forward_backward(engine, [sft_datum(9, 1)])
    assert engine.optim_step("a", AdamParams(learning_rate=1e-3))["grad_norm"] > 0


def test_a_model_of_several_chunks_is_refused() -> None:
    """Interleaved stages: nothing asks Miles for them."""
    one = Parallelism(distributed_optimizer=True)
    one_rank_engine(SETTINGS)  # this process is the only rank of its process group
    rank = CpuMilesRank(arguments_of(tiny_model(), SETTINGS, one), one, 0)
    with stand_in():
        from miles.backends.megatron_utils import actor as actors

        built = actors._built
        vars(actors)["_built"] = lambda *asked: (built(*asked)[0] * 2, None)
        with pytest.raises(ValueError, match="too many values"):
            rank.join("127.0.0.1", 0)


def test_a_model_in_half_precision_is_asked_for_its_hidden_states_as_they_are() -> None:
    from megatron.core.transformer.module import Float16Module

    half = Float16Module.__new__(Float16Module)
    nn.Module.__init__(half)
    assert _precision(SimpleNamespace(module=half)) == {"fp32_output": False}
    assert _precision(SimpleNamespace(module=nn.Identity())) == {}
