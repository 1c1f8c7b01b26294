"""Settings of the built-in sampler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tinsmith_trainer.sampling.builtin.steps.recorded import MOST_RECORDINGS

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class BuiltinSamplerSettings:
    """Sizes of the sampler, which are fixed while the sampler runs. The defaults are those of a CPU.

    In deterministic mode, results depend on these sizes.

    With `deterministic`, a job's result depends only on the job, the weights and the seed. On one type of CPU, the
    result has equal bits each time, because every forward has one of a few fixed shapes. Without `deterministic`, a
    forward is only as large as the used rows, and the logprobs of equal jobs agree to 1e-4. If two probabilities differ
    by less than 1e-4, the same seed may then give another sample. `deterministic` is off by default, because a single
    request would take as long as a full batch, and RL programs do not set seeds. On a CPU with a model of 118 million
    parameters, a full batch takes five to seven times as long as one request. Turn `deterministic` on for tests and for
    debugging.
    """

    deterministic: bool = False
    max_rows: int = 32
    """The number of rows of a decode batch, which must be a power of two.

    Batches of long rows have fewer rows, see `kv_cache_bytes`.
    """
    prefill_block_tokens: int = 64
    """The number of tokens of a block. Prompts are computed and cached block by block."""
    prefill_forward_tokens: int = 256
    """The number of tokens in one forward for prompts. Several short prompts share a forward.

    In deterministic mode a forward computes one block of one prompt. Other work waits until the forward ends.
    """
    prefill_tokens_per_step: int = 512
    """The number of prompt tokens that are computed between two decode steps.

    With this limit, a long prompt does not stall other jobs.
    """
    kv_cache_bytes: int = 2048 * MIB
    """The size of the keys and values of running rows in all batches, in bytes.

    One batch takes at most a quarter of this size, but has at least one row.

    The value on a worker depends on the device (see kv_memory.py).
    """
    longest_row_tokens: int | None = None
    """The length of the longest sequence, if the memory is too small for a sequence of the whole context."""
    prefix_cache_bytes: int = 256 * MIB
    """The size of the prompt prefixes' keys and values that are kept for later jobs, in bytes.

    The least recently used prefixes are evicted first. With 0, no prefixes are kept.
    """
    stacked_adapter_bytes: int = 256 * MIB
    """The size of the adapter copies in all batches, in bytes.

    In deterministic mode each row of a batch has a copy, this is the size for one batch, and larger adapters have
    separate batches. Otherwise larger adapters have separate products.
    """

    adapter_dtype: Literal["float32", "bfloat16"] = "float32"
    """The precision of adapters. `bfloat16` requires a base model in bfloat16."""
    reads_behind: bool | None = None
    """Read a step's tokens while the device computes the next step. With None, `reads_behind` is on for GPUs only.

    On a CPU, `reads_behind` saves no time.
    """
    recorded_steps: int = MOST_RECORDINGS
    """The number of decode steps that are recorded on a GPU, in all batches. With 0, no steps are recorded."""

    def __post_init__(self) -> None:
        if self.max_rows < 1 or self.max_rows & (self.max_rows - 1):
            raise ValueError(f"max_rows is {self.max_rows}; it must be a power of two.")
        for name in ("prefill_block_tokens", "prefill_forward_tokens", "prefill_tokens_per_step", "kv_cache_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1.")
        for name in ("prefix_cache_bytes", "stacked_adapter_bytes", "recorded_steps"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must not be negative.")


def sampler_settings(device_type: str, products: str = "float32") -> BuiltinSamplerSettings:
    """Return the default settings for a type of device, and for the precision of the engine's adapter products.

    On a GPU, a forward of 256 tokens takes nearly as long as a forward of 2,048 tokens. Adapters in float32 take a
    third of the time of a decode step there.
    """
    if device_type == "cpu":
        return BuiltinSamplerSettings()
    return BuiltinSamplerSettings(
        prefill_forward_tokens=2048,
        prefill_tokens_per_step=2048,
        stacked_adapter_bytes=1024 * MIB,
        adapter_dtype="bfloat16" if products == "bfloat16" else "float32",
    )
