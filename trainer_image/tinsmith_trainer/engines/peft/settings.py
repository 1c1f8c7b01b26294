"""What an operator of the PEFT engine may choose."""

from __future__ import annotations

from dataclasses import dataclass

from tinsmith_trainer.engines.base import LoraProducts, LossKernel
from tinsmith_trainer.engines.batching import DEFAULT_TOKEN_BUDGET


@dataclass(frozen=True, slots=True)
class PeftEngineSettings:
    """Limits in adapters, ranks, tokens and bytes.

    `token_budget`: tokens of a microbatch; longer datums go alone. `cobatch_tokens`: microbatches of
    several adapters share a forward while their tokens together stay within it (measured on a CPU: eight of
    16 tokens take half of their time together, eight of 64 tokens 0.8, and nothing is won at 1024 each).
    `logits_byte_budget`: logits above it are computed in chunks, and again in backward; in float32 on a
    CPU so much memory is kept for them from forward to forward, and what has no room in it is computed again.
    `recompute_above_tokens`: layers of a forward of more tokens are computed again in backward.
    `lora_products`: what an adapter's own products are computed in. Its weights, gradients and moments are float32
    whatever it is; `bfloat16` makes no float32 copy of activations, and is for a base in bfloat16.
    `loss_kernel`: what makes logprobs of logits on a GPU, `torch` or `liger`; `auto`: Liger's where it is installed and
    agrees in a trial.
    `token_budget`, `logits_byte_budget`, `recompute_above_tokens`, `lora_products` and `loss_kernel` decide how sums
    are rounded: changing one between a crash and its replay changes bits.
    """

    adapter_slots: int = 64
    max_rank: int = 128
    token_budget: int = DEFAULT_TOKEN_BUDGET
    cobatch_tokens: int = 1024
    logits_byte_budget: int = 256 * 2**20
    recompute_above_tokens: int = 2048
    lora_products: LoraProducts = "float32"
    loss_kernel: LossKernel = "auto"
    map_stable_reinforce: bool = True
