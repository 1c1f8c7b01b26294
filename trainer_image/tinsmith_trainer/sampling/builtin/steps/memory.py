"""The memory of a GPU for decode steps, next to keys and values: stacks of adapters, and recorded steps.

Both are parts of the sampler's share of a GPU's memory. A small GPU has a smaller stack and fewer recordings.
"""

from __future__ import annotations

from dataclasses import dataclass

from tinsmith_trainer.sampling.builtin.steps.recorded import MOST_RECORDINGS

STACK_BYTES, STACK_PART = 1 << 30, 8
"""The memory of a GPU for stacks of adapters, and the largest part of the sampler's share: an eighth."""
RECORDINGS_PART = 4
"""Recorded steps have at most a quarter of the sampler's share."""
KERNELS_PER_LAYER = 97
"""The kernels of a decode step in each layer: 3,500 in 36 layers of Qwen3-8B."""
RECORDED_BYTES_PER_KERNEL = 24 * 1024
"""An estimate of what the driver holds on the device for each kernel of a CUDA graph.

vLLM reports 24 MiB for the graph of a whole decode step (https://github.com/vllm-project/vllm/issues/50780), which is
taken for a thousand kernels.
"""
FLOAT32_BYTES = 4


@dataclass(frozen=True, slots=True)
class StepMemory:
    """The memory of a GPU for decode steps, next to keys and values: stacks of adapters, and recorded steps."""

    stacked_adapter_bytes: int
    recorded_steps: int
    recorded_bytes: int

    @property
    def nbytes(self) -> int:
        return self.stacked_adapter_bytes + self.recorded_bytes


@dataclass(frozen=True, slots=True)
class StepSizes:
    """The sizes of a model's decode step with `rows` rows.

    `heads_per_key_head` is the number of query heads that share a key head. `records`: steps can be recorded.
    """

    layers: int
    heads_per_key_head: int
    vocab: int
    element_bytes: int
    rows: int
    records: bool

    def bytes_of_a_recording(self) -> int:
        """Return what each recording holds: its logits in float32, and the driver's copy of its kernels."""
        kernels = KERNELS_PER_LAYER * self.layers
        return self.rows * self.vocab * FLOAT32_BYTES + kernels * RECORDED_BYTES_PER_KERNEL

    def shared_bytes(self, batch_bytes: int) -> int:
        """Return what all recordings share: the tensors within a step, on a batch whose keys and values are this large.

        The largest ones are the keys and values of one layer, which transformers repeats for each query head, and the
        logits in the weights' type and in float32.
        """
        repeated = batch_bytes // self.layers * (self.heads_per_key_head if self.heads_per_key_head > 1 else 0)
        return repeated + self.rows * self.vocab * (self.element_bytes + FLOAT32_BYTES)

    def memory(self, share: int, longest_row_bytes: int) -> StepMemory:
        """Divide the sampler's share. A batch has a quarter of the share, or one row of the whole context."""
        stacked = min(STACK_BYTES, share // STACK_PART)
        together = self.shared_bytes(min(share, max(share // 4, longest_row_bytes)))
        fitting = (share // RECORDINGS_PART - together) // self.bytes_of_a_recording()
        recorded = max(0, min(MOST_RECORDINGS, fitting)) if self.records else 0
        return StepMemory(stacked, recorded, together + recorded * self.bytes_of_a_recording() if recorded else 0)
