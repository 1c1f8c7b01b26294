"""Settings of the built-in sampler."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class BuiltinSamplerSettings:
    """Sizes of the sampler, fixed for its life. In deterministic mode results depend on them.

    `deterministic` makes a job's result a function of the job, the weights and the seed alone, bit for bit on the same
    CPU type: every forward has one of a few fixed shapes. If it is off, a forward is as small as the used rows, and the
    same job agrees to 1e-4 in its logprobs, so that a seed may give another sample if two tokens are that close. It is
    off by default because a single request pays for a full batch (five to seven times its time, on a CPU with a model
    of 118 million parameters) and RL programs do not set seeds. Turn it on for tests and for debugging.
    """

    deterministic: bool = False
    max_rows: int = 32
    """Rows of a decode batch, a power of two. Long rows share smaller batches, see `kv_cache_bytes`."""
    prefill_block_tokens: int = 64
    """Prompts are computed, and their prefixes cached, in blocks of this many tokens."""
    prefill_forward_tokens: int = 256
    """Tokens of one forward for prompts, of several if they are short. In deterministic mode it is one block of one
    prompt. Other work waits for the forward."""
    prefill_tokens_per_step: int = 512
    """Prompt tokens computed between two decode steps, so that a long prompt does not stall other jobs."""
    kv_cache_bytes: int = 2048 * MIB
    """Keys and values of running rows, all batches together. One batch takes a quarter at most, but has at least one
    row.

    A worker's value depends on its device, see kv_memory.py."""
    longest_row_tokens: int | None = None
    """The longest sequence, if the memory for keys and values holds less than the model's context."""
    prefix_cache_bytes: int = 256 * MIB
    """Keys and values of prompt prefixes kept for later jobs. The least recently used are evicted first; 0 keeps none.
    """
    stacked_adapter_bytes: int = 256 * MIB
    """Copies of adapters in one batch. If each row has a copy (in deterministic mode, and on GPUs), larger adapters
    decode in their own batches; else each has its own products."""

    reads_behind: bool | None = None
    """Read a step's tokens while the next step is computed. None: on GPUs. On a CPU it saves no time."""

    def __post_init__(self) -> None:
        if self.max_rows < 1 or self.max_rows & (self.max_rows - 1):
            raise ValueError(f"max_rows is {self.max_rows}; it must be a power of two.")
        for name in ("prefill_block_tokens", "prefill_forward_tokens", "prefill_tokens_per_step", "kv_cache_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1.")
        if self.prefix_cache_bytes < 0 or self.stacked_adapter_bytes < 0:
            raise ValueError("prefix_cache_bytes and stacked_adapter_bytes must not be negative.")
