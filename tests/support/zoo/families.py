"""Families of text models that transformers has, each as a tiny random model.

`FAMILIES` is what `make zoo` goes through, by model type. Those in `IN_EVERY_RUN` differ most from each other.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from support.temporary_files import folder_of_whole_run
from support.tiny_models import tiny_directory
from tinsmith_trainer.torch_model.loading import TorchModel, load_torch_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

Config = Mapping[str, Any]

SIZES: Config = {
    "vocab_size": 304,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.05,
    **{"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2},
}
HEADS: Config = {"head_dim": 16}
EXPERTS: Config = {
    **HEADS,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}
GROUPED: Config = {
    **EXPERTS,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
LATENT: Config = {
    **GROUPED,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
INDEXED: Config = {**LATENT, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 64}
LINEAR: Config = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
}
MAMBA: Config = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_d_state": 16,
    "mamba_chunk_size": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
}
SHARED_EXPERT: Config = {"shared_expert_intermediate_size": 32}

FAMILIES: Mapping[str, Config] = {
    # Attention and a dense layer, by turns.
    "llama": HEADS,
    "mistral": {**HEADS, "sliding_window": 24},
    "ministral": HEADS,
    "qwen2": {},
    "qwen3": HEADS,
    "phi3": {},
    "gemma": HEADS,
    "gemma2": {**HEADS, "sliding_window": 24, "final_logit_softcapping": 3.0},
    "gemma3_text": {**HEADS, "sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"]},
    "gemma4_text": {
        # Its scores are not scaled down: with heads of 16 a gradient is what large terms leave of each other.
        "head_dim": 32,
        "global_head_dim": 64,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": 304,
        "initializer_range": 0.2,
    },
    "olmo2": {},
    "olmo3": {},
    "smollm3": {},
    "granite": {"logits_scaling": 8.0},
    "cohere2": {"logit_scale": 0.25},
    "glm4": HEADS,
    "exaone4": HEADS,
    "starcoder2": {},
    "stablelm": {},
    "nemotron": HEADS,
    "seed_oss": HEADS,
    "hunyuan_v1_dense": HEADS,
    "ernie4_5": HEADS,
    "apertus": HEADS,
    "gpt_neox": {},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 64},
    # Mixtures of experts.
    "mixtral": EXPERTS,
    "qwen2_moe": {**EXPERTS, **SHARED_EXPERT, "decoder_sparse_step": 1},
    "qwen3_moe": EXPERTS,
    "olmoe": EXPERTS,
    "phimoe": EXPERTS,
    "granitemoe": {**EXPERTS, "logits_scaling": 8.0},
    "gpt_oss": {**EXPERTS, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 24},
    "glm4_moe": GROUPED,
    "minimax_m2": EXPERTS,
    "ernie4_5_moe": {**EXPERTS, "moe_num_experts": 4, "moe_k": 2},
    "hunyuan_v1_moe": EXPERTS,
    "llama4_text": {**EXPERTS, "intermediate_size_mlp": 64, "interleave_moe_layer_step": 1},
    # Latent attention.
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "glm4_moe_lite": LATENT,
    "deepseek_v32": INDEXED,
    "glm_moe_dsa": INDEXED,
    "longcat_flash": {
        **{**LATENT, "num_layers": 2, "ffn_hidden_size": 64, "expert_ffn_hidden_size": 32},
        **{"zero_expert_num": 2, "moe_topk": 2},
    },
    # So that sequences of the zoo are long enough for every layer's compression.
    "deepseek_v4": {**LATENT, "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}},
    "minicpm3": LATENT,
    # Linear attention, convolutions and state spaces.
    "qwen3_next": {**EXPERTS, **LINEAR, **SHARED_EXPERT},
    "qwen3_5_text": {**HEADS, **LINEAR},
    "olmo_hybrid": LINEAR,
    "kimi_linear": {**LATENT, **LINEAR, "linear_head_dim": 16, "linear_num_heads": 4},
    "lfm2_moe": {**EXPERTS, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "falcon_h1": {**HEADS, **MAMBA, "mamba_d_ssm": 128},
    "granitemoehybrid": {**EXPERTS, **MAMBA, "shared_intermediate_size": 64, "layer_types": ["mamba", "attention"]},
    "nemotron_h": {
        **{"head_dim": 16, "num_hidden_layers": 3, "hybrid_override_pattern": "M*-", "chunk_size": 16},
        **{"mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 1},
    },
    "jamba": {
        **{"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
        **{"num_experts": 4, "num_experts_per_tok": 2, "mamba_d_state": 8, "use_mamba_kernels": False},
    },
    "bamba": {**MAMBA, "attn_layer_indices": [1]},
    "minimax": {**EXPERTS, "layer_types": ["linear_attention", "full_attention"], "block_size": 16},
    "mamba": {"state_size": 8},
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1, "chunk_size": 16},
    "recurrent_gemma": {"num_hidden_layers": 3, "lru_width": 64},
    # Of another build: no `layers`, or projections that are no linear layers.
    "gpt2": {},
    "rwkv": {"attention_hidden_size": 64},
}
IN_EVERY_RUN = (
    *("llama", "phi3", "gemma2", "gemma3_text", "olmo2", "granite", "opt"),
    *("qwen2_moe", "gpt_oss", "minimax_m2", "llama4_text", "deepseek_v3", "minicpm3"),
    *("qwen3_5_text", "lfm2", "falcon_h1", "jamba", "mamba", "gpt2"),
)


@functools.cache
def family_directory(model_type: str, **sizes: int) -> Path:
    """Return a model directory, which is removed when the run ends. `sizes` replace the family's own."""
    config = AutoConfig.for_model(model_type, **{**SIZES, **FAMILIES[model_type], **sizes})
    directory = folder_of_whole_run(f"{model_type}-")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).float().save_pretrained(directory)
    AutoTokenizer.from_pretrained(tiny_directory()).save_pretrained(directory)
    return directory


@functools.cache
def family_model(model_type: str) -> TorchModel:
    return load_torch_model(str(family_directory(model_type)))
