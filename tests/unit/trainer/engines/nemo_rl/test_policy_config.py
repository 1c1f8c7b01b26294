from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tinsmith_trainer.engines.megatron.flags import RankRecompute
from tinsmith_trainer.engines.megatron.model.ranked_model import RankedModel
from tinsmith_trainer.engines.megatron.parallelism import Parallelism
from tinsmith_trainer.engines.megatron.sharding import length_multiple
from tinsmith_trainer.engines.nemo_rl.policy_config import policy_config
from tinsmith_trainer.errors import ModelDirectoryInvalid

KEYS = Path(__file__).parent / "policy_keys.txt"
MODEL = RankedModel(
    directory=Path("/models/base"),
    vocab_size=151_936,
    kv_heads=8,
    tied_embeddings=False,
    max_rank=64,
    max_tokens=4000,
    token_budget=8192,
)
MIXTURE = replace(MODEL, experts=128)

ASKED_FOR_BEYOND_THE_EXAMPLE = {
    "dtensor_cfg.enabled",  # the example inherits the section with it
    "generation",  # the example has a section of them
    "megatron_cfg.train_iters",  # _validate_training_config in nemo_rl/models/megatron/setup.py
    "sequence_packing.fuse_loss",  # LossPostProcessor.__call__ in nemo_rl/models/megatron/train.py
}
OF_A_DRAFT_MODEL = {"draft.aux_layer_indices", "draft.loss_weight", "draft.model_name", "draft.num_layers"}


def leaves(config: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in config.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def examples_keys() -> set[str]:
    return {line for line in KEYS.read_text().splitlines() if not line.startswith("#")}


def test_every_key_of_the_example_is_there_and_no_other_that_nothing_asks_for() -> None:
    own_keys = set(leaves(policy_config(MODEL, Parallelism(8, tensor=4))))
    assert examples_keys() - own_keys == OF_A_DRAFT_MODEL
    assert own_keys - examples_keys() == ASKED_FOR_BEYOND_THE_EXAMPLE


def test_nothing_but_the_callers_loss_reaches_gradients() -> None:
    config = policy_config(MODEL, Parallelism())
    megatron = config["megatron_cfg"]
    assert config["generation"] is None
    assert (megatron["moe_router_load_balancing_type"], megatron["moe_router_bias_update_rate"]) == ("none", 0.0)
    assert (megatron["mtp_num_layers"], megatron["mtp_loss_scaling_factor"]) == (0, 0.0)
    assert (megatron["peft"]["dropout"], megatron["optimizer"]["clip_grad"]) == (0.0, 0.0)


def test_a_mixture_has_adapters_of_its_experts_in_the_place_of_a_feed_forwards() -> None:
    dense, mixture = (policy_config(model, Parallelism())["megatron_cfg"] for model in (MODEL, MIXTURE))
    attention = ["linear_q", "linear_k", "linear_v", "linear_proj"]
    feed_forward = ["linear_fc1_gate", "linear_fc1_up", "linear_fc2"]
    assert dense["peft"]["target_modules"] == [*attention, *feed_forward, "output_layer"]
    assert mixture["peft"]["target_modules"] == [*attention, "experts", "output_layer"]


@pytest.mark.parametrize(
    ("recompute", "is_on", "granularity", "modules"),
    [("none", False, "selective", ["mlp"]), ("mlp", True, "selective", ["mlp"]), ("layers", True, "full", None)],
)
def test_the_configured_layers_are_recomputed(
    recompute: RankRecompute, is_on: bool, granularity: str, modules: list[str] | None
) -> None:
    """`_apply_performance_config` reads the two others where the first is on."""
    megatron = policy_config(replace(MODEL, recompute=recompute), Parallelism())["megatron_cfg"]
    assert megatron["activation_checkpointing"] is is_on
    assert (megatron["recompute_granularity"], megatron["recompute_modules"]) == (granularity, modules)


@given(
    tensor=st.sampled_from([1, 2, 4, 8]),
    context=st.sampled_from([1, 2, 4]),
    max_tokens=st.integers(1, 200_000),
    token_budget=st.integers(1, 100_000),
)
def test_rows_and_packed_microbatches_hold_the_longest_datum_and_divide_among_the_ranks(
    tensor: int, context: int, max_tokens: int, token_budget: int
) -> None:
    parallelism = Parallelism(tensor * context, tensor=tensor, context=context)
    config = policy_config(replace(MODEL, max_tokens=max_tokens, token_budget=token_budget), parallelism)
    multiple = length_multiple(tensor=tensor, context=context)
    assert config["make_sequence_length_divisible_by"] == multiple
    for length in (config["max_total_sequence_length"], config["sequence_packing"]["train_mb_tokens"]):
        assert length >= max_tokens + 1
        assert length % multiple == 0


@pytest.mark.parametrize(
    ("change", "parallelism", "sentence"),
    [
        ({}, Parallelism(2, expert=2), "has no experts, which 2 ranks cannot share equally"),
        ({"experts": 6}, Parallelism(4, expert=4), "has 6 experts, which 4 ranks cannot share equally"),
        ({"experts": 6, "max_rank": 4}, Parallelism(2, expert=2), "max_rank is 4. Choose a multiple of 8"),
        ({"kv_heads": 2}, Parallelism(4, tensor=4), "has 2 key and value heads, which 4 tensor ranks cannot share"),
        ({"vocab_size": 50_257}, Parallelism(2, tensor=2), "50257 tokens in its vocabulary"),
        ({"max_rank": 36}, Parallelism(8, tensor=8), "36 rows of LoRA's A"),
        ({"tied_embeddings": True}, Parallelism(2, pipeline=2), "Use 1 pipeline stage"),
    ],
)
def test_ranks_that_could_not_hold_the_model_are_refused_with_a_sentence(
    change: dict[str, Any], parallelism: Parallelism, sentence: str
) -> None:
    with pytest.raises(ModelDirectoryInvalid, match=sentence):
        policy_config(replace(MODEL, **change), parallelism)
