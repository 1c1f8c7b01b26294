"""How many tokens a microbatch has, and from how many on layers are computed again in backward, by the device's memory.

On a CPU more tokens are not faster, and fewer let others have their turn sooner. A GPU is fast when it has much to do,
so there a microbatch is as large as a share of the memory beside the weights. What does not fit into that share keeps
the inputs of its layers alone, for a third more time. All follows from the device's whole memory and not from what is
free, since a start after a crash has to cut its calls as the one before did.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import structlog
import torch

from tinsmith_trainer.engines.base import Recompute
from tinsmith_trainer.engines.batching import DEFAULT_TOKEN_BUDGET, counted_gpu_memory
from tinsmith_trainer.torch_model.loading import TorchModel

log = structlog.get_logger(__name__)

ACTIVATIONS_SHARE = 0.4
"""Of a GPU's memory beside the weights. Keys and values of samples take a quarter, adapters and logits the rest."""
LARGEST_TOKEN_BUDGET = 16_384
KEPT_ON_A_CPU = 2048
FLOAT32_BYTES = 4


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Both are numbers of tokens, of a microbatch and of a forward."""

    token_budget: int
    recompute_above_tokens: int


def plan_memory(torch_model: TorchModel, given_budget: int | None, recompute: Recompute) -> MemoryPlan:
    """`given_budget` by the operator, or None."""
    if torch_model.device.type == "cuda":
        reported = torch.cuda.get_device_properties(torch_model.device).total_memory
        room = activations_room(counted_gpu_memory(reported), weight_bytes(torch_model.model))
        plan = plan_for_room(room, torch_model.model.config, torch_model.model.dtype.itemsize, given_budget, recompute)
    else:
        budget = given_budget or DEFAULT_TOKEN_BUDGET
        plan = MemoryPlan(budget, _threshold(recompute, max(KEPT_ON_A_CPU, budget)))
    log.info(
        "memory is planned",
        token_budget=plan.token_budget,
        recompute=recompute,
        recompute_above_tokens=None if recompute == "none" else plan.recompute_above_tokens,
    )
    return plan


def activations_room(memory_bytes: int, base_bytes: int) -> int:
    """What a GPU of so much memory has for a microbatch's activations beside the weights."""
    return int((memory_bytes - base_bytes) * ACTIVATIONS_SHARE)


def plan_for_room(
    room_bytes: int, config: Any, element_bytes: int, given_budget: int | None, recompute: Recompute
) -> MemoryPlan:
    """Without a budget given: the power of two that fits, from 1,024 on."""
    kept = room_bytes // activation_bytes_per_token(config, element_bytes)
    bytes_per_token = (recomputed_bytes_per_token if recompute == "layers" else activation_bytes_per_token)(
        config, element_bytes
    )
    fitting = max(DEFAULT_TOKEN_BUDGET, room_bytes // bytes_per_token)
    budget = given_budget or min(LARGEST_TOKEN_BUDGET, 1 << (fitting.bit_length() - 1))
    return MemoryPlan(budget, _threshold(recompute, kept))


def _threshold(recompute: Recompute, kept_tokens: int) -> int:
    thresholds: dict[Recompute, int] = {"auto": kept_tokens, "layers": 0, "none": sys.maxsize}
    return thresholds[recompute]


def activation_bytes_per_token(config: Any, element_bytes: int) -> int:
    """What a forward keeps for its backward of one token, in a decoder whose layers are not computed again.

    Of each layer: the inputs of its projections and what attention and the gated product need, in the weights' type,
    and the two norms' inputs in float32. Frozen weights need no inputs of their own; LoRA on every layer does.
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
    """The same where layers are computed again: the input of each, and all of the one that is at work."""
    text = config.get_text_config()
    inputs = text.num_hidden_layers * text.hidden_size * element_bytes
    return int(inputs + activation_bytes_per_token(config, element_bytes) // text.num_hidden_layers)


def weight_bytes(model: torch.nn.Module) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
