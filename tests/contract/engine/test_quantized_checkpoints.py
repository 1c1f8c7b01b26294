"""Checkpoints that hold MXFP4 or FP8 are read as the weights that those stand for; other formats are refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.zoo.families import family_directory
from tinsmith.training.errors import BaseModelUnusable
from tinsmith.training.exports.base_model import BaseModel
from tinsmith.training.exports.merging import MergedWeights
from tinsmith_trainer.engines.base import LoraSpec
from tinsmith_trainer.engines.peft import build_peft_engine
from tinsmith_trainer.errors import ModelDirectoryInvalid
from tinsmith_trainer.torch_model.loading import load_torch_model
from tinsmith_trainer.torch_model.quantized_checkpoints import load_to_save
from transformers import AutoConfig, AutoModelForCausalLM

# Each a multiple of what a block takes.
SIZES = {"moe_intermediate_size": 64, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "head_dim": 16}
TOKENS = torch.tensor([[5, 9, 2, 14, 7, 11, 3, 8]])
FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
FP8_BLOCK = 32

Tensors = dict[str, torch.Tensor]


def fp8(tensors: Tensors) -> tuple[Tensors, Tensors]:
    """As DeepSeek has it: a scale for each block of a matrix. What is stored, and what it stands for."""
    stored, dense = dict(tensors), dict(tensors)
    for name, weight in tensors.items():
        if not name.endswith("proj.weight"):
            continue
        rows, columns = weight.shape
        blocks = weight.view(rows // FP8_BLOCK, FP8_BLOCK, columns // FP8_BLOCK, FP8_BLOCK)
        scales = blocks.abs().amax((1, 3)) / 448
        codes = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
        stored[name] = codes.view(rows, columns)
        stored[f"{name}_scale_inv"] = scales
        dense[name] = (codes.float() * scales[:, None, :, None]).view(rows, columns)
    return stored, dense


def mxfp4(tensors: Tensors) -> tuple[Tensors, Tensors]:
    """As gpt-oss has it: experts' weights by blocks of 32 along what is summed, each with a power of two."""
    stored, dense = dict(tensors), dict(tensors)
    for name, weight in tensors.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            continue
        blocks = weight.mT.reshape(*weight.mT.shape[:2], -1, 32)
        exponents = torch.floor(torch.log2(blocks.abs().amax(-1))) - 2
        scaled = blocks / 2 ** exponents[..., None]
        codes = (scaled.abs()[..., None] - FP4).abs().argmin(-1)
        signed = codes + 8 * (scaled < 0)
        del stored[name]
        stored[f"{name}_blocks"] = (signed[..., ::2] | (signed[..., 1::2] << 4)).to(torch.uint8)
        stored[f"{name}_scales"] = (exponents + 127).to(torch.uint8)
        dense[name] = (FP4[codes] * scaled.sign() * 2 ** exponents[..., None]).view(weight.mT.shape).mT.contiguous()
    return stored, dense


FORMATS: dict[str, tuple[str, Callable[[Tensors], tuple[Tensors, Tensors]], dict[str, Any]]] = {
    "fp8": ("deepseek_v3", fp8, {"weight_block_size": [FP8_BLOCK, FP8_BLOCK], "fmt": "e4m3"}),
    "mxfp4": ("gpt_oss", mxfp4, {"modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}),
}


def make(method: str, folder: Path) -> tuple[Path, Path]:
    """A checkpoint in that format, and one of the weights that it stands for."""
    family, encode, options = FORMATS[method]
    made = family_directory(family, **SIZES)
    directories = (folder / "stored", folder / "dense")
    for directory in directories:
        shutil.copytree(made, directory)
    for directory, tensors in zip(directories, encode(load_file(made / "model.safetensors")), strict=True):
        save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    say_format(directories[0], {"quant_method": method, **options})
    return directories


def say_format(directory: Path, quantization: dict[str, Any]) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))


@pytest.mark.parametrize("method", FORMATS)
def test_a_quantized_checkpoint_is_the_model_that_it_stands_for(method: str, tmp_path: Path) -> None:
    stored, dense = make(method, tmp_path)
    model = load_torch_model(str(stored))
    assert model.info.stored_as == method
    plain = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(model.model(TOKENS).logits, plain(TOKENS).logits, atol=1e-5, rtol=0)
    engine = build_peft_engine(model)
    engine.create_adapter("a", LoraSpec(rank=4, alpha=8.0, seed=1))
    engine.export(engine.state("a"), tmp_path / "merged", "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert not hasattr(merged.config, "quantization_config")
    with torch.no_grad():
        torch.testing.assert_close(merged(TOKENS).logits, plain(TOKENS).logits, atol=1e-5, rtol=0)


@pytest.mark.parametrize("method", FORMATS)
def test_a_client_that_merges_into_one_has_the_model_that_it_stands_for(method: str, tmp_path: Path) -> None:
    stored, dense = make(method, tmp_path)
    MergedWeights(base := BaseModel(str(stored)), base.load()).save_pretrained(tmp_path / "merged")
    plain, merged = (AutoModelForCausalLM.from_pretrained(folder) for folder in (dense, tmp_path / "merged"))
    assert not hasattr(merged.config, "quantization_config")
    with torch.no_grad():
        torch.testing.assert_close(merged(TOKENS).logits, plain(TOKENS).logits, atol=1e-5, rtol=0)


@pytest.mark.parametrize("side", ["client", "trainer"])
@pytest.mark.parametrize("method", FORMATS)
def test_a_model_that_was_made_dense_runs_as_it_is_and_generates_as_its_makers_say(
    method: str, side: str, tmp_path: Path
) -> None:
    stored, dense = make(method, tmp_path)
    says = {"eos_token_id": [3, 7], "do_sample": True, "temperature": 0.6, "top_p": 0.95}
    for directory in (stored, dense):
        (directory / "generation_config.json").write_text(json.dumps(says))
    plain = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32)
    if side == "client":
        made = BaseModel(str(stored)).load()
    else:
        made = load_to_save(AutoModelForCausalLM, stored, AutoConfig.from_pretrained(stored), torch.float32)
    assert [name for name, one in (*made.named_parameters(), *made.named_buffers()) if one.is_meta] == []
    with torch.no_grad():
        torch.testing.assert_close(made(TOKENS).logits, plain(TOKENS).logits, atol=1e-5, rtol=0)
    assert made.generation_config.to_diff_dict() == plain.generation_config.to_diff_dict()
    made.save_pretrained(tmp_path / "written")
    written = json.loads((tmp_path / "written" / "generation_config.json").read_text())
    assert {name: written.get(name) for name in says} == says


def test_a_format_that_is_not_read_is_refused_with_those_that_are(tmp_path: Path) -> None:
    _, dense = make("mxfp4", tmp_path)
    say_format(dense, {"quant_method": "awq", "bits": 4})
    with pytest.raises(BaseModelUnusable, match="quantized by 'awq', and only mxfp4 and fp8 are made dense here"):
        BaseModel(str(dense)).load()
    with pytest.raises(ModelDirectoryInvalid, match="quantized by 'awq', and only mxfp4 and fp8 are read"):
        load_torch_model(str(dense))
