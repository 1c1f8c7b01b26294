"""A formula for the number of GPUs that a model needs with the nemo-rl engine, and the table for docs/.

The figures are computed, not measured. `Layout.gpu_bytes` and docs/how-to/nemo-rl.md list what is counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import get_args

from tinsmith_trainer.engines.megatron.engine import SHARED_BYTES_PER_PARAMETER, SHARING_BYTES
from tinsmith_trainer.engines.megatron.flags import RankRecompute
from tinsmith_trainer.engines.megatron.sharding import LOGPROB_CHUNK_TOKENS

GIB = 1024**3
GPU_GIB = 80
ROOM = 0.9
"""The usable part of a GPU's memory. The rest is lost in gaps between the allocator's blocks."""
OTHERS_GIB = 5
"""A high estimate for the context of CUDA, the buffers of NCCL and the workspaces of TransformerEngine."""
GPUS_PER_NODE = 8

BASE_BYTES = 2
"""The bytes of a base weight. A base weight is bfloat16 and frozen, without a gradient and without optimizer state."""
ADAPTER_BYTES = 2 + 4 + 4 + 8
"""The bytes of an adapter weight in the model: bfloat16, float32 gradient, float32 master, and Adam's two moments."""
SLOT_BYTES = 4 + 8 + 4
"""The bytes in host memory for a weight while another adapter is in the model: master, moments, and a gradient."""
SLOTS = 8
"""The adapters that may share a forward, if the memory for them suffices: the default of `adapters.slots`."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes in a transformer model with gated feed-forward layers and grouped-query attention."""

    name: str
    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head: int
    vocab: int
    tied: bool = False

    def projections(self) -> list[tuple[int, int]]:
        """Return the input and output sizes of each linear layer in a transformer layer."""
        query, key_value = self.heads * self.head, self.kv_heads * self.head
        attention = [(self.hidden, query), (self.hidden, key_value), (self.hidden, key_value), (query, self.hidden)]
        return [*attention, (self.hidden, self.inner), (self.hidden, self.inner), (self.inner, self.hidden)]

    def values(self) -> tuple[int, int]:
        """Return how many values each token has in the inputs and outputs of a layer's projections.

        The first number is for attention, and the second is for the feed-forward layers.
        """
        widths = [inputs + outputs for inputs, outputs in self.projections()]
        return sum(widths[:4]), sum(widths[4:])

    def kept_values(self, recompute: RankRecompute) -> int:
        """Return how many values a layer keeps for the backward pass, for each token.

        Flash attention keeps no further values.
        """
        attention, feed_forward = self.values()
        kept = {"layers": self.hidden, "mlp": attention + self.hidden, "none": attention + feed_forward}
        return kept[recompute]

    @property
    def parameters(self) -> int:
        embeddings = self.vocab * self.hidden * (1 if self.tied else 2)
        return self.layers * sum(inputs * outputs for inputs, outputs in self.projections()) + embeddings

    def adapter_parameters(self, rank: int) -> int:
        """Return the parameters of an adapter slot: all linear layers and the unembedding, at the highest rank."""
        layer = sum(inputs + outputs for inputs, outputs in self.projections())
        return rank * (self.layers * layer + self.hidden + self.vocab)


@dataclass(frozen=True, slots=True)
class Layout:
    """One copy of a model on `tensor` x `pipeline` GPUs."""

    tensor: int
    pipeline: int

    @property
    def gpus(self) -> int:
        return self.tensor * self.pipeline

    def fits(self, sizes: Sizes) -> bool:
        """Return whether the model can be divided equally among the ranks.

        Tensor ranks must be on the same node, because tensor ranks communicate in every layer.
        """
        whole = (sizes.kv_heads % self.tensor, sizes.layers % self.pipeline, sizes.vocab % self.tensor)
        return whole == (0, 0, 0) and self.tensor <= GPUS_PER_NODE and not (sizes.tied and self.pipeline > 1)

    def sharing_bytes(self, sizes: Sizes, rank: int) -> float:
        """Return the memory for the adapters of a shared forward, as `MegatronEngine` limits it.

        Each adapter has a copy of its weights, and its gradients, both in float32.
        """
        each = SHARED_BYTES_PER_PARAMETER * sizes.adapter_parameters(rank) / self.gpus
        return min(SHARING_BYTES, SLOTS * each)

    def gpu_bytes(self, sizes: Sizes, rank: int, tokens: int, recompute: RankRecompute = "layers") -> float:
        """Return the memory that the fullest GPU uses. `tokens`: the number of tokens in a microbatch."""
        base = BASE_BYTES * sizes.parameters / self.gpus
        adapter = ADAPTER_BYTES * sizes.adapter_parameters(rank) / self.gpus
        # The first stage of a pipeline has as many microbatches in progress as the pipeline has stages. For each of
        # them it keeps the values of its own layers.
        kept = 2 * tokens * sizes.kept_values(recompute) * sizes.layers / self.tensor
        # One recomputed layer and its gradients: two values for each input and output of its projections.
        working = 2 * 2 * tokens * sum(sizes.values()) / self.tensor
        # One chunk of tokens: bfloat16 logits and their gradient, and float32 logits with the intermediate values of
        # softmax.
        logits = (2 * 2 + 3 * 4) * min(tokens, LOGPROB_CHUNK_TOKENS) * sizes.vocab / self.tensor
        return base + adapter + self.sharing_bytes(sizes, rank) + kept + max(working, logits) + OTHERS_GIB * GIB


def smallest(sizes: Sizes, rank: int, tokens: int) -> Layout | None:
    """Return the layout that uses the fewest GPUs.

    Of layouts with the same number of GPUs, return the layout with the fewest pipeline stages.

    Fewer pipeline stages are better, because stages wait for other stages.
    """
    layouts = [Layout(tensor, pipeline) for tensor, pipeline in product((1, 2, 4, 8), (1, 2, 4))]
    fitting = [
        layout
        for layout in layouts
        if layout.fits(sizes) and layout.gpu_bytes(sizes, rank, tokens) <= ROOM * GPU_GIB * GIB
    ]
    return min(fitting, key=lambda layout: (layout.gpus, layout.pipeline), default=None)


MODELS = (
    Sizes("Qwen3-0.6B", 28, 1024, 3072, 16, 8, 128, 151_936, tied=True),
    Sizes("Qwen3-8B", 36, 4096, 12_288, 32, 8, 128, 151_936),
    Sizes("Llama-3.1-8B", 32, 4096, 14_336, 32, 8, 128, 128_256),
    Sizes("Qwen3-14B", 40, 5120, 17_408, 40, 8, 128, 151_936),
    Sizes("Qwen3-32B", 64, 5120, 25_600, 64, 8, 128, 151_936),
    Sizes("Llama-3.1-70B", 80, 8192, 28_672, 64, 8, 128, 128_256),
)
RANKS = (32, 128)
TOKENS = (8192, 32_768)

HEADER = (
    "Model",
    "Highest rank",
    "GPUs for a copy",
    "tensor x pipeline",
    "GiB on each",
    "GiB of host memory a slot",
)

RECOMPUTE_HEADER = (
    "Model",
    "GPUs for a copy",
    *(f"`--recompute {recompute}`" for recompute in get_args(RankRecompute)),
)


def rows() -> Iterator[tuple[str, ...]]:
    """Return a row for each model and rank, for the larger number of tokens."""
    tokens = TOKENS[-1]
    for sizes, rank in product(MODELS, RANKS):
        layout = smallest(sizes, rank, tokens)
        slot = f"{SLOT_BYTES * sizes.adapter_parameters(rank) / GIB:.1f}"
        if layout is None:
            yield sizes.name, str(rank), "more than 32", "", "", slot
            continue
        used = layout.gpu_bytes(sizes, rank, tokens) / GIB
        shape = f"{layout.tensor} x {layout.pipeline}"
        yield sizes.name, str(rank), str(layout.gpus), shape, f"{used:.0f}", slot


def recompute_rows() -> Iterator[tuple[str, ...]]:
    """Return the GiB per GPU of the smallest layout with recomputed layers, for the lower rank and number of tokens."""
    for sizes in MODELS:
        layout = smallest(sizes, RANKS[0], TOKENS[0])
        if layout is not None:
            choices = get_args(RankRecompute)
            used = [layout.gpu_bytes(sizes, RANKS[0], TOKENS[0], recompute) / GIB for recompute in choices]
            cells = [f"{gib:.0f}" if gib <= ROOM * GPU_GIB else f"{gib:.0f}, too many" for gib in used]
            yield sizes.name, str(layout.gpus), *cells
