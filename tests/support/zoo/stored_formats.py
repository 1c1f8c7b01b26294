"""Checkpoints whose weights are in MXFP4 or FP8, and the plain checkpoints that they stand for."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from support.zoo.families import family_directory
from tinsmith_trainer.torch_model.loading import TorchModel, load_torch_model
from transformers import AutoModelForCausalLM

# Each a multiple of what a block takes.
SIZES = {"moe_intermediate_size": 64, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "head_dim": 16}
TOKENS = torch.tensor([[5, 9, 2, 14, 7, 11, 3, 8]])
FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
FP8_BLOCK = 32

Tensors = dict[str, torch.Tensor]


def fp8(tensors: Tensors) -> tuple[Tensors, Tensors]:
    """Return a matrix as DeepSeek stores it, with a scale for each block, and the matrix that it stands for."""
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
    """Return experts' weights as gpt-oss stores them, a power of two for each 32 summands, and what they stand for."""
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
    """Make a checkpoint in that format, and one of the weights that it stands for."""
    family, encode, options = FORMATS[method]
    source = family_directory(family, **SIZES)
    directories = (folder / "stored", folder / "dense")
    for directory in directories:
        shutil.copytree(source, directory)
    for directory, tensors in zip(directories, encode(load_file(source / "model.safetensors")), strict=True):
        save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    say_format(directories[0], {"quant_method": method, **options})
    return directories


def say_format(directory: Path, quantization: dict[str, Any]) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))


def read_as_its_dense_twin(method: str, folder: Path) -> tuple[TorchModel, Any]:
    """Load a checkpoint in that format, and in plain transformers the weights it stands for: their logits are close."""
    stored, dense = make(method, folder)
    model = load_torch_model(str(stored))
    plain = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(model.model(TOKENS).logits, plain(TOKENS).logits, atol=1e-5, rtol=0)
    return model, plain


GENERATION = {"eos_token_id": [3, 7], "do_sample": True, "temperature": 0.6, "top_p": 0.95}


def say_generation(directories: tuple[Path, Path]) -> None:
    """Write a generation configuration, as makers of a model do."""
    for directory in directories:
        (directory / "generation_config.json").write_text(json.dumps(GENERATION))


def check_dequantized(loaded: Any, plain: Any, folder: Path) -> None:
    """Check that it runs as the plain one does, and is written with its makers' generation settings."""
    assert [name for name, one in (*loaded.named_parameters(), *loaded.named_buffers()) if one.is_meta] == []
    with torch.no_grad():
        torch.testing.assert_close(loaded(TOKENS).logits, plain(TOKENS).logits, atol=1e-5, rtol=0)
    assert loaded.generation_config.to_diff_dict() == plain.generation_config.to_diff_dict()
    loaded.save_pretrained(folder)
    written = json.loads((folder / "generation_config.json").read_text())
    assert {name: written.get(name) for name in GENERATION} == GENERATION
