"""Tiny whole models out of which transformers loads the text model alone."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from support.temporary_files import folder_of_whole_run
from support.tiny_models import tiny_directory
from transformers import AutoConfig, AutoModelForImageTextToText

TEXT: Mapping[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
QWEN: Mapping[str, Any] = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
}
QWEN_EXPERTS: Mapping[str, Any] = {
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
QWEN_VISION: Mapping[str, Any] = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
}
LLAMA_VISION: Mapping[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "image_size": 16,
    "patch_size": 8,
}
WHOLE_MODELS: Mapping[str, Mapping[str, Any]] = {
    "qwen3_5": {"text_config": {**TEXT, **QWEN}, "vision_config": QWEN_VISION},
    "qwen3_5_moe": {"text_config": {**TEXT, **QWEN, **QWEN_EXPERTS}, "vision_config": QWEN_VISION},
    "qwen4_exp": {
        "text_config": {**TEXT, **QWEN, **QWEN_EXPERTS, "layer_types": ["linear_attention"] * 2},
        "vision_config": QWEN_VISION,
    },
    "llama4": {
        "text_config": {**TEXT, "head_dim": 16, "intermediate_size_mlp": 96, "num_local_experts": 2},
        "vision_config": {
            **LLAMA_VISION,
            "num_attention_heads": 2,
            "vision_output_dim": 32,
            "projector_input_dim": 32,
            "projector_output_dim": 32,
        },
    },
    "mllama": {
        "text_config": {**TEXT, "cross_attention_layers": [1]},
        "vision_config": {
            **LLAMA_VISION,
            "attention_heads": 2,
            "num_global_layers": 1,
            "vision_output_dim": 64,
            "intermediate_layers_indices": [0],
        },
    },
}


@functools.cache
def whole_model(model_type: str) -> Path:
    """Save a tiny whole model, as transformers lays it out for the hub."""
    folder = folder_of_whole_run(f"tiny-{model_type}-")
    for file in tiny_directory().glob("*token*"):
        shutil.copy(file, folder)
    config = AutoConfig.for_model(model_type, **WHOLE_MODELS[model_type])
    with torch.random.fork_rng():
        torch.manual_seed(0)
        AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    return folder
