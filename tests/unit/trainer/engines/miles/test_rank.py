"""The patches that make a rank of Miles' actor, and the requirements on its model before Megatron wraps it."""

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
from tinsmith_trainer.engines.miles.rank import sums_in
from tinsmith_trainer.errors import ServerError

SETTINGS = MegatronSettings(adapter_slots=2, max_rank=8)


class Bridge:
    def to_megatron_provider(self, load_weights: bool) -> Any:
        assert not load_weights
        return SimpleNamespace(calculate_per_token_loss=False, pipeline_dtype=None, params_dtype="bfloat16")


def test_only_models_built_inside_get_gradient_accumulation_and_the_shapes_between_stages() -> None:
    with sums_in(Bridge):
        provider = Bridge().to_megatron_provider(load_weights=False)
    assert (provider.calculate_per_token_loss, provider.pipeline_dtype) == (True, "bfloat16")
    assert not Bridge().to_megatron_provider(load_weights=False).calculate_per_token_loss


def test_a_bridge_is_as_it_was_after_a_rank_that_fails() -> None:
    stock = Bridge.to_megatron_provider
    with pytest.raises(RuntimeError), sums_in(Bridge):
        raise RuntimeError("a rank fails")
    assert Bridge.to_megatron_provider is stock


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
        rank.prepare()
        with pytest.raises(ServerError, match="Miles built 2 model chunks on one rank"):
            rank.join("127.0.0.1", 0)
