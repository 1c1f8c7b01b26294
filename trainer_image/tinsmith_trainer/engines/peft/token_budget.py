"""How many tokens a microbatch has: what the operator says, else what the device has memory for.

On a CPU more tokens are not faster, and fewer let others have their turn sooner. A GPU is fast when it has much to do,
so there a microbatch is as large as a share of the memory beside the weights. It follows from the device's whole memory
and not from what is free, since a start after a crash has to cut its calls as the one before did.
"""

from __future__ import annotations

from typing import Any

import torch

from tinsmith_trainer.engines.batching import DEFAULT_TOKEN_BUDGET
from tinsmith_trainer.torch_model.loading import TorchModel

ACTIVATIONS_SHARE = 0.4
"""Of a GPU's memory beside the weights. Keys and values of samples take a quarter, adapters and logits the rest."""
LARGEST_TOKEN_BUDGET = 16_384
FLOAT32_BYTES = 4


def token_budget_of(torch_model: TorchModel, given: int | None) -> int:
    """`given` by the operator, or by the device."""
    if given is not None:
        return given
    if torch_model.device.type != "cuda":
        return DEFAULT_TOKEN_BUDGET
    memory_bytes = torch.cuda.get_device_properties(torch_model.device).total_memory
    return fitting_token_budget(
        memory_bytes, torch_model.model.config, weight_bytes(torch_model.model), torch_model.model.dtype.itemsize
    )


def fitting_token_budget(memory_bytes: int, config: Any, base_bytes: int, element_bytes: int) -> int:
    """The power of two whose activations take `ACTIVATIONS_SHARE` at most, from 1,024 on."""
    room = int((memory_bytes - base_bytes) * ACTIVATIONS_SHARE)
    fitting = max(DEFAULT_TOKEN_BUDGET, room // activation_bytes_per_token(config, element_bytes))
    return min(LARGEST_TOKEN_BUDGET, 1 << (fitting.bit_length() - 1))


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


def weight_bytes(model: torch.nn.Module) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
