"""The settings of the PEFT engine, and those that follow from the device's memory.

On a CPU larger microbatches are not faster, and smaller ones let other calls run sooner. A GPU is fast with much work,
so there a microbatch is as large as a share of the memory next to the weights. Longer forwards keep only the inputs of
their layers, for a third more time. Everything follows from the device's total memory and not from what is free,
because a start after a crash has to split its calls in the same way.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import Any

import structlog
import torch

from tinsmith_trainer.engines.base import LoraProducts, LossKernel, Numerics, Recompute
from tinsmith_trainer.engines.batching import DEFAULT_TOKEN_BUDGET, counted_gpu_memory
from tinsmith_trainer.torch_model.loading import TorchModel

LOGITS_BYTES_ON_A_CPU = 256 * 2**20


@dataclass(frozen=True, slots=True)
class PeftEngineSettings:
    """Limits in adapters, ranks, tokens and bytes.

    - `numerics`: `exact` computes every call so that its bits depend on nothing else. `fast` lets calls share forwards
      and products on any device.
    - `token_budget`: tokens of a microbatch; longer datums run alone.
    - `cobatch_tokens`: microbatches of several adapters share a forward of at most this many tokens. Measured on a CPU:
      eight of 16 tokens take half of their time together, eight of 64 tokens 0.8, and with 1024 each nothing is gained.
    - `logits_byte_budget`: more logits are computed in chunks, and again in backward. In float32 on a CPU this much
      memory is kept for them between forwards, and what does not fit is recomputed.
    - `recompute_above_tokens`: layers of a longer forward are recomputed in backward.
    - `lora_products`: the precision of an adapter's own products. Its weights, gradients and moments are always
      float32. `bfloat16` avoids a float32 copy of activations, and requires a base in bfloat16.
    - `loss_kernel`: computes logprobs from logits on a GPU: `torch` or `liger`; `auto` uses Liger's if it is installed
      and passes a trial.

    All but the numbers of slots and the highest rank determine how sums are rounded: changing one between a crash and
    its replay changes bits.
    """

    numerics: Numerics = "exact"
    adapter_slots: int = 64
    max_rank: int = 128
    token_budget: int = DEFAULT_TOKEN_BUDGET
    cobatch_tokens: int = 1024
    logits_byte_budget: int = LOGITS_BYTES_ON_A_CPU
    recompute_above_tokens: int = 2048
    lora_products: LoraProducts = "float32"
    loss_kernel: LossKernel = "auto"
    map_stable_reinforce: bool = True


log = structlog.get_logger(__name__)

ACTIVATIONS_SHARE = 0.4
"""The share of a GPU's memory next to the weights. A sampler's keys and values use a quarter."""
LARGEST_TOKEN_BUDGET = 16_384
KEPT_ON_A_CPU = 2048
LOGITS_BYTES_ON_A_GPU = 1280 * 2**20
"""The logits of 4,096 tokens of Qwen3 in bfloat16, so that one microbatch's logits are computed only once."""
FLOAT32_BYTES = 4


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The tokens of a microbatch, of the longest forward without recomputation, and of a forward of several calls."""

    token_budget: int
    recompute_above_tokens: int
    cobatch_tokens: int


def device_settings(device_type: str, dtype: torch.dtype, plan: MemoryPlan | None = None) -> PeftEngineSettings:
    """Return the default settings for a device and the dtype of the base weights, with the limits of a plan.

    Numerics are exact where this has no price: on the CPU in float32. On a GPU float32 products of adapters would cost
    more than the products of the base in bfloat16.
    """
    on_gpu = device_type != "cpu"
    defaults = PeftEngineSettings(
        numerics="exact" if dtype == torch.float32 and not on_gpu else "fast",
        logits_byte_budget=LOGITS_BYTES_ON_A_GPU if on_gpu else LOGITS_BYTES_ON_A_CPU,
        lora_products="bfloat16" if dtype == torch.bfloat16 and on_gpu else "float32",
    )
    if plan is None:
        return defaults
    return replace(
        defaults,
        token_budget=plan.token_budget,
        cobatch_tokens=plan.cobatch_tokens,
        recompute_above_tokens=plan.recompute_above_tokens,
    )


def plan_memory(torch_model: TorchModel, configured_budget: int | None, recompute: Recompute) -> MemoryPlan:
    """Plan for the device. `configured_budget` is the operator's setting, or None."""
    if torch_model.device.type == "cuda":
        reported = torch.cuda.get_device_properties(torch_model.device).total_memory
        room = activations_room(counted_gpu_memory(reported), weight_bytes(torch_model.model))
        plan = plan_for_room(
            room, torch_model.model.config, torch_model.model.dtype.itemsize, configured_budget, recompute
        )
    else:
        budget = configured_budget or DEFAULT_TOKEN_BUDGET
        plan = MemoryPlan(budget, _threshold(recompute, max(KEPT_ON_A_CPU, budget)), DEFAULT_TOKEN_BUDGET)
    log.info(
        "planned the memory",
        token_budget=plan.token_budget,
        recompute=recompute,
        recompute_above_tokens=None if recompute == "none" else plan.recompute_above_tokens,
    )
    return plan


def activations_room(memory_bytes: int, base_bytes: int) -> int:
    """Return the memory that a GPU has for a microbatch's activations."""
    return int((memory_bytes - base_bytes) * ACTIVATIONS_SHARE)


def plan_for_room(
    room_bytes: int, config: Any, element_bytes: int, configured_budget: int | None, recompute: Recompute
) -> MemoryPlan:
    """Plan for this memory. If no budget is given, choose the largest power of two that fits, at least 1,024."""
    kept = room_bytes // activation_bytes_per_token(config, element_bytes)
    bytes_per_token = (recomputed_bytes_per_token if recompute == "layers" else activation_bytes_per_token)(
        config, element_bytes
    )
    fitting = max(DEFAULT_TOKEN_BUDGET, room_bytes // bytes_per_token)
    budget = configured_budget or min(LARGEST_TOKEN_BUDGET, 1 << (fitting.bit_length() - 1))
    # Calls of several adapters fill what one call's power of two leaves, unless the layers are recomputed.
    shared = budget if recompute == "layers" else max(budget, min(LARGEST_TOKEN_BUDGET, kept))
    return MemoryPlan(budget, _threshold(recompute, kept), shared)


def _threshold(recompute: Recompute, kept_tokens: int) -> int:
    thresholds: dict[Recompute, int] = {"auto": kept_tokens, "layers": 0, "none": sys.maxsize}
    return thresholds[recompute]


def activation_bytes_per_token(config: Any, element_bytes: int) -> int:
    """Return the bytes per token that a forward keeps for backward, if no layer is recomputed.

    Each layer keeps the inputs of its projections, and the values that attention and the gated product need, in the
    weights' type. It keeps the two norms' inputs in float32. Frozen weights need no inputs of their own; LoRA on every
    layer does.
    """
    text = config.get_text_config()
    heads = text.num_attention_heads
    head_width = getattr(text, "head_dim", None) or text.hidden_size // heads
    key_heads = getattr(text, "num_key_value_heads", None) or heads
    attention = (2 * heads + 2 * key_heads) * head_width
    kept = 4 * text.hidden_size + attention + 4 * text.intermediate_size
    of_a_layer = kept * element_bytes + 2 * text.hidden_size * FLOAT32_BYTES
    return int(text.num_hidden_layers * of_a_layer)


def recomputed_bytes_per_token(config: Any, element_bytes: int) -> int:
    """Return the bytes per token with recomputed layers: the input of each layer, and all values of the current one."""
    text = config.get_text_config()
    inputs = text.num_hidden_layers * text.hidden_size * element_bytes
    return int(inputs + activation_bytes_per_token(config, element_bytes) // text.num_hidden_layers)


def weight_bytes(model: torch.nn.Module) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
