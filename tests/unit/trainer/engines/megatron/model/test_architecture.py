from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tinsmith_trainer.engines.megatron.model.architecture import (
    Mixture,
    check_cpu_dimensions,
    check_divisible,
    read_architecture,
    read_mixture,
)
from tinsmith_trainer.engines.megatron.parallelism import Parallelism
from tinsmith_trainer.errors import ModelDirectoryInvalid
from transformers import (
    DeepseekV3Config,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    MixtralConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

DIRECTORY = Path("models/small")
SIZES: dict[str, Any] = {
    "num_hidden_layers": 6,
    "hidden_size": 96,
    "intermediate_size": 200,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "vocab_size": 1001,
    "max_position_embeddings": 128,
}


def test_sizes_come_from_the_config_and_qwen3_alone_has_norms_of_queries_and_keys() -> None:
    qwen3 = read_architecture(DIRECTORY, Qwen3Config(**SIZES, tie_word_embeddings=True))
    assert (qwen3.layers, qwen3.head_size, qwen3.vocab_size) == (6, 16, 1001)
    assert (qwen3.query_key_norms, qwen3.tied_embeddings) == (True, True)
    llama = read_architecture(DIRECTORY, LlamaConfig(**SIZES, tie_word_embeddings=False))
    assert (llama.query_key_norms, llama.tied_embeddings) == (False, False)


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (LlamaConfig(**SIZES, attention_bias=True), "it has biases in its layers"),
        (LlamaConfig(**SIZES, mlp_bias=True), "it has biases in its layers"),
        (LlamaConfig(**SIZES, hidden_act="gelu"), "it has the activation 'gelu'"),
        (Qwen3Config(**SIZES, use_sliding_window=True), "it has a sliding window"),
        (
            LlamaConfig(**SIZES, rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}),
            "rotary positions of the type 'yarn'",
        ),
        (
            LlamaConfig(
                **SIZES, rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
            ),
            "rotary positions in a part of each head",
        ),
    ],
    ids=["attention-bias", "mlp-bias", "activation", "sliding-window", "yarn", "partial"],
)
def test_a_configuration_that_the_layers_would_compute_differently_is_refused(config: Any, sentence: str) -> None:
    with pytest.raises(ModelDirectoryInvalid, match=sentence):
        read_architecture(DIRECTORY, config)


@pytest.mark.parametrize(
    ("parallelism", "sentence"),
    [
        (Parallelism(world_size=5, tensor=5), "12 attention heads, which do not divide among 5 tensor ranks"),
        (Parallelism(world_size=6, tensor=6), "4 key and value heads, which do not divide among 6 tensor ranks"),
        (Parallelism(world_size=4, pipeline=4), "6 layers, which do not divide among 4 pipeline ranks"),
    ],
    ids=["heads", "groups", "layers"],
)
def test_parts_that_do_not_come_out_even_are_refused(parallelism: Parallelism, sentence: str) -> None:
    with pytest.raises(ModelDirectoryInvalid, match=sentence):
        check_divisible(DIRECTORY, read_architecture(DIRECTORY, LlamaConfig(**SIZES)), parallelism)


def mixture(**changes: Any) -> Qwen3MoeConfig:
    sizes = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 50, "norm_topk_prob": True}
    return Qwen3MoeConfig(**{**SIZES, **sizes, **changes})


def test_a_mixture_has_experts_in_every_layer_and_says_how_they_are_weighted() -> None:
    assert read_architecture(DIRECTORY, mixture()).mixture == Mixture(6, 2, 50, renormalised=True)
    assert read_architecture(DIRECTORY, LlamaConfig(**SIZES)).mixture is None
    for partly in ({"mlp_only_layers": [0]}, {"decoder_sparse_step": 2}):
        with pytest.raises(ModelDirectoryInvalid, match="'qwen3_moe', and has layers without them"):
            read_architecture(DIRECTORY, mixture(**partly))


def test_mixtures_of_other_families_are_refused_also_where_dense_models_of_all_are_taken() -> None:
    assert read_mixture(DIRECTORY, GraniteConfig()) is None
    for other in (MixtralConfig(), DeepseekV3Config()):
        with pytest.raises(ModelDirectoryInvalid, match=f"is of '{other.model_type}'. Use the peft engine"):
            read_mixture(DIRECTORY, other)


@pytest.mark.parametrize(
    ("config", "parallelism", "sentence"),
    [
        (LlamaConfig(**SIZES), Parallelism(2, expert=2), "has no experts to divide among 2 ranks"),
        (mixture(), Parallelism(2, tensor=2), "Set tensor parallelism to 1, and divide the experts"),
        (mixture(), Parallelism(4, expert=4), "6 experts, which do not divide among 4 expert ranks"),
    ],
    ids=["dense", "tensor", "experts"],
)
def test_experts_that_ranks_cannot_share_are_refused(config: Any, parallelism: Parallelism, sentence: str) -> None:
    with pytest.raises(ModelDirectoryInvalid, match=sentence):
        check_divisible(DIRECTORY, read_architecture(DIRECTORY, config), parallelism)


def test_models_and_dimensions_that_need_a_gpu_are_refused_on_the_cpu() -> None:
    with pytest.raises(ModelDirectoryInvalid, match=r"support models of the families .*; models/small is of 'gpt2'"):
        read_architecture(DIRECTORY, GPT2Config())
    check_cpu_dimensions(Parallelism(4, tensor=2))
    with pytest.raises(ValueError, match="do not support context parallelism, which was set to 2"):
        check_cpu_dimensions(Parallelism(4, context=2))
