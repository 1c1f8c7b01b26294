"""Frozen base weights in 8 or 4 bits, and checkpoints that hold quantized weights.

Quantized weights are unpacked for each use.

Only the linear layers and experts that adapters cover are quantized; the output projection is not quantized. Adapters
and all computation keep the full width. Weights are unpacked for each product, and again for the product's gradient,
and are not kept in between. So the weights take the memory of the codes and of one unpacked layer. A product has the
same bits as in a model with the unpacked weights, so batching and replay work in the same way with quantized weights.

`4bit` is NF4 (Dettmers et al., QLoRA, 2023, appendix E) in blocks of 64 along a weight's elements. `8bit` is symmetric
by rows. The results are the same as from bitsandbytes' `quantize_4bit` and `int8_vectorwise_quant`.

gpt-oss comes in MXFP4, DeepSeek V3 in FP8 with scales by blocks. Both formats are unpacked to the dtype of the
computation when the files are read. So engine and sampler use ordinary weights. Checkpoints in other quantized formats
are refused.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import FineGrainedFP8Config, Mxfp4Config
from typing_extensions import override

from tinsmith_trainer.errors import ModelDirectoryInvalid
from tinsmith_trainer.torch_model.architecture import skeleton
from tinsmith_trainer.torch_model.base_model import Quantization
from tinsmith_trainer.torch_model.experts import is_adaptable
from tinsmith_trainer.torch_model.lora import module_family

DENSE = {"mxfp4": Mxfp4Config, "fp8": FineGrainedFP8Config}
BLOCK = 64
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
LARGEST_INT8 = 127
ROWS_AT_ONCE = 2**22
"""The number of elements that are compared with all sixteen values of NF4 at once."""
EXPERT_WEIGHTS = ("gate_up_proj", "up_proj", "down_proj")


class QuantizedWeight(nn.Module):
    """A weight `[..., d_out, d_in]`, stored as codes and scales.

    A quantized weight has no torch parameters, because it is not trained.
    """

    codes: Tensor
    scales: Tensor
    table: Tensor

    def __init__(self, weight: Tensor, bits: Quantization) -> None:
        super().__init__()
        self.shape, self.dtype, self.bits = weight.shape, weight.dtype, bits
        codes, scales = _to_nf4(weight) if bits == "4bit" else _to_int8(weight)
        self.register_buffer("codes", codes)
        self.register_buffer("scales", scales)
        self.register_buffer("table", torch.tensor(NF4, device=weight.device))

    def dense(self) -> Tensor:
        """Unpack the weight to the original dtype."""
        if self.bits == "8bit":
            return (self.codes.float() * (self.scales / LARGEST_INT8)).to(self.dtype)
        pairs = torch.stack([self.codes >> 4, self.codes & 15], -1).int()
        blocks = self.table[pairs].view(-1, BLOCK) * self.scales
        return blocks.view(-1)[: self.shape.numel()].view(self.shape).to(self.dtype)


def _to_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes in the weight's shape, and scales `[..., d_out, 1]`. A scale is the largest magnitude of a row."""
    scales = weight.float().abs().amax(-1, keepdim=True)
    codes = torch.round(weight.float() * (LARGEST_INT8 / scales.clamp(min=torch.finfo(torch.float32).tiny)))
    return codes.to(torch.int8), scales


def _to_nf4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes and scales `[blocks, 1]`. A byte holds two codes, the first code in the upper half.

    A scale is the largest magnitude of a block.
    """
    flat = weight.detach().float().reshape(-1)
    blocks = functional.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(1, keepdim=True)
    scaled = (blocks / scales.clamp(min=torch.finfo(torch.float32).tiny)).view(-1)
    table = torch.tensor(NF4, device=weight.device)
    borders = (table[1:] + table[:-1]) / 2
    codes = torch.cat([torch.bucketize(part, borders).to(torch.uint8) for part in torch.split(scaled, ROWS_AT_ONCE)])
    first, second = codes.view(-1, 2).unbind(1)
    return (first << 4) | second, scales


class QuantizedLinear(nn.Linear):
    """A frozen linear layer that unpacks the weight for each use."""

    def __init__(self, linear: nn.Linear, bits: Quantization) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self.quantized = QuantizedWeight(linear.weight, bits)

    @property
    @override
    def weight(self) -> Tensor:  # type: ignore[override]
        return self.quantized.dense()

    @override
    def forward(self, input: Tensor) -> Tensor:
        out: Tensor = _FrozenProduct.apply(input, self)
        return out


class _FrozenProduct(torch.autograd.Function):
    """A product with a quantized weight, which keeps no unpacked weight for the backward."""

    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor, layer: QuantizedLinear) -> Tensor:
        ctx.layer = layer
        return functional.linear(x, layer.weight, layer.bias)

    @staticmethod
    @override
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad @ ctx.layer.weight, None


def quantize(decoder: nn.Module, bits: Quantization) -> None:
    """Replace weights by codes, layer by layer. Call this before the layers are wrapped."""
    linears = {
        name: module
        for name, module in decoder.named_modules()
        if type(module) is nn.Linear and module_family(name) not in (None, "unembed")
    }
    for name, linear in linears.items():
        parent, _, child = name.rpartition(".")
        setattr(decoder.get_submodule(parent), child, QuantizedLinear(linear, bits))
    for module in list(decoder.modules()):
        if is_adaptable(module):
            _quantize_experts(module, bits)


def _quantize_experts(module: nn.Module, bits: Quantization) -> None:
    """Replace the weights of experts by properties.

    Properties belong to a class, so the module gets a separate class.
    """
    names = [name for name in EXPERT_WEIGHTS if name in module._parameters]
    held = nn.ModuleDict({name: QuantizedWeight(getattr(module, name), bits) for name in names})
    for name in names:
        delattr(module, name)
    module.quantized_weights = held
    whole = {name: property(partial(_dense, name=name)) for name in names}
    module.__class__ = type(type(module).__name__, (type(module),), whole)


def _dense(module: Any, name: str) -> Tensor:
    weight: Tensor = module.quantized_weights[name].dense()
    return weight


def stored_format(config: Any) -> str:
    """Return transformers' name for the format, or an empty string for dense weights."""
    return str(_options(config).get("quant_method", ""))


def dequantizing(directory: Path, config: Any) -> dict[str, Any]:
    """Return additional arguments for loading with transformers.

    A checkpoint that is not quantized needs no additional arguments.

    Raises ModelDirectoryInvalid for an unsupported format.
    """
    options, method = _options(config), stored_format(config)
    if not method:
        return {}
    if method not in DENSE:
        raise ModelDirectoryInvalid(
            f"The weights in {directory} are quantized by {method!r}; supported are {' and '.join(DENSE)}. "
            "Use the model's original weights, with --quantization to keep them in few bits."
        )
    settings = {name: value for name, value in options.items() if name != "quant_method"}
    return {"quantization_config": DENSE[method](**{**settings, "dequantize": True})}


def widen(model: Any, dtype: torch.dtype) -> None:
    """Cast unpacked weights to the dtype in which the model computes, if they have a narrower dtype.

    transformers before 5.23 unpacks MXFP4 to bfloat16 for any requested dtype. bfloat16 holds each value of MXFP4
    exactly, but the layer would also compute in bfloat16: logits of a float32 model had an error of 5e-3.
    """
    for parameter in model.parameters():
        if parameter.is_floating_point() and torch.finfo(parameter.dtype).bits < torch.finfo(dtype).bits:
            parameter.data = parameter.data.to(dtype)


def _options(config: Any) -> dict[str, Any]:
    declared = getattr(config, "quantization_config", None) or {}
    return dict(declared if isinstance(declared, dict) else declared.to_dict())


def load_to_save(architecture: Any, directory: Path, config: Any, dtype: torch.dtype) -> Any:
    """Return a model that `save_pretrained` writes with dense weights, without traces of the quantized format.

    `architecture` is the transformers class that loads the model.
    """
    options = dequantizing(directory, config)
    model = architecture.from_pretrained(directory, config=config, dtype=dtype, **options)
    if not options:
        return model
    widen(model, dtype)
    # transformers would write the weights back in that format, which it supports for some only.
    for named in (config, config.get_text_config()):
        if getattr(named, "quantization_config", None) is not None:
            del named.quantization_config
    dense = skeleton(config, dtype=dtype)
    dense.load_state_dict(model.state_dict(), assign=True)
    _take_what_no_state_has(dense, model)
    return dense


def _take_what_no_state_has(dense: Any, model: Any) -> None:
    """Copy the parts that are not in a checkpoint: buffers such as frequencies, the generation config and the mode."""
    persistent = model.state_dict().keys()
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if name not in persistent:
            parent, _, leaf = name.rpartition(".")
            dense.get_submodule(parent).register_buffer(leaf, buffer, persistent=False)
    dense.generation_config = model.generation_config
    dense.train(model.training)
