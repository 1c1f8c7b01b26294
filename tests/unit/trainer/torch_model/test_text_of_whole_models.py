"""transformers loads the text model alone out of some whole models: their towers may lie in the files, unchecked."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.whole_models import WHOLE_MODELS, whole_model
from tinsmith_trainer.errors import ModelDirectoryInvalid
from tinsmith_trainer.torch_model.loading import load_torch_model
from tinsmith_trainer.torch_model.quantization import load_to_save
from tinsmith_trainer.torch_model.stored_weights import checked_config
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

WEIGHTS = "model.safetensors"
UNTESTED = {
    "dots3_note": "takes many more sizes to be made tiny",
    "emu3": "transformers finds none of its tensors: it looks for model.*, and the files have text_model.model.*",
}


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


def test_a_saved_fp8_checkpoint_does_not_record_its_format(tmp_path: Path) -> None:
    directory = Path(shutil.copytree(whole_model("qwen3_5"), tmp_path / "model"))
    config = AutoConfig.from_pretrained(directory)
    config.quantization_config = {"quant_method": "fp8", "weight_block_size": [32, 32]}
    load_to_save(AutoModelForCausalLM, directory, config, torch.float32).save_pretrained(tmp_path / "saved")
    assert "quantization_config" not in (tmp_path / "saved" / "config.json").read_text()
