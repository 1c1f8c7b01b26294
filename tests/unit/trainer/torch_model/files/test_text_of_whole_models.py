"""transformers loads the text model alone out of some whole models: their towers may lie in the files, unchecked."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.temporary_files import folder_of_whole_run
from support.tiny_models import tiny_directory
from tinsmith_trainer.errors import ModelDirectoryInvalid
from tinsmith_trainer.torch_model.files.checked_config import checked_config
from tinsmith_trainer.torch_model.loading import load_torch_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

WEIGHTS = "model.safetensors"
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
UNTESTED = {
    "dots3_note": "takes many more sizes to be made tiny",
    "emu3": "transformers finds none of its tensors: it looks for model.*, and the files have text_model.model.*",
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


def embedding_in(tensors: Mapping[str, torch.Tensor]) -> str:
    [name] = [name for name in tensors if name.endswith(".embed_tokens.weight")]
    return name


def whole_models_with_a_text_model_of_their_own() -> set[str]:
    causal, whole = AutoModelForCausalLM._model_mapping, AutoModelForImageTextToText._model_mapping
    found = set()
    for model_type in causal._model_mapping.keys() & whole._model_mapping.keys():
        config = type(AutoConfig.for_model(model_type))
        if causal[config].config_class is config.sub_configs.get("text_config"):
            found.add(model_type)
    return found


def test_these_are_all_families_out_of_which_the_text_model_alone_is_loaded() -> None:
    assert whole_models_with_a_text_model_of_their_own() == WHOLE_MODELS.keys() | UNTESTED.keys()


@pytest.mark.parametrize("model_type", WHOLE_MODELS)
def test_a_whole_model_is_accepted_with_its_towers(model_type: str) -> None:
    assert checked_config(whole_model(model_type)).model_type == model_type


@pytest.mark.parametrize("model_type", WHOLE_MODELS)
def test_a_tensor_of_the_text_model_is_missed_in_a_whole_model(model_type: str, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(whole_model(model_type), tmp_path / "model"))
    tensors = load_file(directory / WEIGHTS)
    del tensors[embedding_in(tensors)]
    save_file(tensors, directory / WEIGHTS, {"format": "pt"})
    with pytest.raises(ModelDirectoryInvalid, match=r"1 missing \(model\.embed_tokens\.weight\)"):
        checked_config(directory)


@pytest.mark.parametrize("model_type", WHOLE_MODELS)
def test_the_text_model_of_a_whole_model_has_no_other_tensors(model_type: str, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(whole_model(model_type), tmp_path / "model"))
    tensors = load_file(directory / WEIGHTS)
    bias = embedding_in(tensors).replace("embed_tokens.weight", "layers.1.self_attn.bias")
    save_file({**tensors, bias: torch.ones(8), "v_head.weight": torch.ones(8)}, directory / WEIGHTS, {"format": "pt"})
    with pytest.raises(ModelDirectoryInvalid, match=r"2 that it does not have \(.*self_attn\.bias, v_head\.weight\)"):
        checked_config(directory)


def test_a_whole_model_that_is_accepted_can_be_loaded() -> None:
    assert type(load_torch_model(str(whole_model("qwen3_5"))).model).__name__ == "Qwen3_5ForCausalLM"
