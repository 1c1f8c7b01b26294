"""What an operator of the nemo-rl engine may choose."""

from __future__ import annotations

from dataclasses import dataclass

from tinsmith_trainer.batching import DEFAULT_TOKEN_BUDGET


@dataclass(frozen=True, slots=True)
class NemoRlSettings:
    """Limits in adapters, ranks of LoRA and tokens.

    Every adapter takes the memory of one of `max_rank` on all modules. `token_budget`: tokens of a microbatch on one
    data-parallel copy of the model; longer datums go alone. It decides how sums are rounded: changing it between
    a crash and its replay changes bits.
    """

    adapter_slots: int = 64
    max_rank: int = 128
    token_budget: int = DEFAULT_TOKEN_BUDGET
    map_stable_reinforce: bool = True
