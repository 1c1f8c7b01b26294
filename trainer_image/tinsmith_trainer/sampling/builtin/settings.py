"""Settings of the built-in sampler."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class BuiltinSamplerSettings:
    """Sizes of the sampler, fixed for its life. In deterministic mode results depend on them.

    With `deterministic`, a job's result depends only on the job, the weights and the seed. It is equal bit for bit on
    one type of CPU, because every forward has one of a few fixed shapes. Without it, a forward is only as large as the
    used rows, and the logprobs of equal jobs agree to 1e-4. If two tokens are that close, the same seed may then give
    another sample. The setting is off by default, because a single request pays for a full batch (five to seven times
    its time, on a CPU with a model of 118 million parameters) and RL programs do not set seeds. Turn it on for tests
    and for debugging.
    """

    deterministic: bool = False
    max_rows: int = 32
    """The rows of a decode batch, a power of two. Batches of long rows have fewer rows, see `kv_cache_bytes`."""
    prefill_block_tokens: int = 64
    """The tokens of a block. Prompts are computed, and their prefixes cached, block by block."""
    prefill_forward_tokens: int = 256
    """The tokens of one forward for prompts. Several short prompts share a forward. In deterministic mode a forward
    computes one block of one prompt. Other work waits for the forward."""
    prefill_tokens_per_step: int = 512
    """The prompt tokens that are computed between two decode steps, so that a long prompt does not stall other jobs."""
    kv_cache_bytes: int = 2048 * MIB
    """The keys and values of running rows in all batches, in bytes. One batch takes at most a quarter, but has at least
    one row.

    A worker's value depends on its device, see kv_memory.py."""
    longest_row_tokens: int | None = None
    """The length of the longest sequence, if the memory for keys and values holds less than the model's context."""
    prefix_cache_bytes: int = 256 * MIB
    """The bytes of prompt prefixes' keys and values that are kept for later jobs. The least recently used ones are
    evicted first; 0 keeps none."""
    stacked_adapter_bytes: int = 256 * MIB
    """The bytes of adapter copies in one batch. If each row has a copy (in deterministic mode, and on GPUs), larger
    adapters have their own batches. Otherwise each adapter has its own products."""

    reads_behind: bool | None = None
    """Read a step's tokens while the device computes the next step. None: only on GPUs. On a CPU this saves no time."""

    def __post_init__(self) -> None:
        if self.max_rows < 1 or self.max_rows & (self.max_rows - 1):
            raise ValueError(f"max_rows is {self.max_rows}; it must be a power of two.")
        for name in ("prefill_block_tokens", "prefill_forward_tokens", "prefill_tokens_per_step", "kv_cache_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1.")
        if self.prefix_cache_bytes < 0 or self.stacked_adapter_bytes < 0:
            raise ValueError("prefix_cache_bytes and stacked_adapter_bytes must not be negative.")
