"""Loading of a transformers checkpoint into one rank's parameters of Megatron's GPT model.

Megatron fuses tensors that are separate in transformers, and divides the fused tensors among tensor ranks:

- `linear_qkv` holds, for each group of query heads, the query heads, then the key, then the value of the group;
- `linear_fc1` holds a rank's part of gate, then the rank's part of up;
- `linear_proj` and `linear_fc2` are divided by columns, and all other weights by rows; norms and routers are whole on
  each rank;
- each expert of a mixture has a separate `linear_fc1` and `linear_fc2`, and each expert rank has some of the experts;
- the embedding and the output layer are padded with zeros, so that all ranks have equal parts.

A rank reads only the rank's own parts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import safe_open
from torch import Tensor

from tinsmith_trainer.engines.megatron.model.architecture import Architecture
from tinsmith_trainer.errors import ModelDirectoryInvalid

EMBEDDING, UNEMBEDDING = "model.embed_tokens.weight", "lm_head.weight"


class Checkpoint:
    """The tensors of a model directory by name, read in parts. The object is a context manager."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._open_files = ExitStack()
        self._file_of: dict[str, Any] = {}
        shards = sorted(directory.glob("*.safetensors"))
        if not shards:
            raise ModelDirectoryInvalid(
                f"{directory} has no *.safetensors, which ranks read in parts. Save the model "
                "again with transformers, which writes them."
            )
        for shard in shards:
            file = self._open_files.enter_context(safe_open(str(shard), framework="pt"))
            self._file_of.update(dict.fromkeys(file.keys(), file))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open_files.close()

    def part(self, name: str, shape: tuple[int, ...], split: int | None, part: Part) -> Tensor:
        """Return this rank's part of a tensor, which must have `shape`. If `split` is None, return the whole tensor."""
        if name not in self._file_of:
            raise ModelDirectoryInvalid(f"The weights in {self._directory} lack the tensor {name}.")
        lazy = self._file_of[name].get_slice(name)
        if tuple(lazy.get_shape()) != shape:
            raise ModelDirectoryInvalid(
                f"The tensor {name} in {self._directory} has the shape {tuple(lazy.get_shape())}; config.json says "
                f"{shape}."
            )
        if split is None:
            found: Tensor = lazy[:]
        else:
            within = part.of(shape[split])
            found = lazy[within] if split == 0 else lazy[:, within]
        return found


@dataclass(frozen=True, slots=True)
class Part:
    """The index of this tensor rank's part, and the number of equal parts."""

    index: int
    count: int

    def width(self, size: int) -> int:
        """Return the width of every part, including the padding in the last parts."""
        return -(-size // self.count)

    def of(self, size: int) -> slice:
        """Return the range of indices that this part covers in a dimension.

        If the size is not divisible, the last parts are shorter or empty.
        """
        width = self.width(size)
        return slice(min(self.index * width, size), min((self.index + 1) * width, size))


@dataclass(frozen=True, slots=True)
class Loader:
    """A loader that reads one tensor rank's parameters from a checkpoint."""

    checkpoint: Checkpoint
    architecture: Architecture
    part: Part
    experts: Part = Part(0, 1)

    def load(self, chunk: Any) -> None:
        """Fill every parameter of a GPTModel's pipeline stage."""
        # Megatron counts the whole model's layers from 1.
        makers = self._makers([layer.layer_number - 1 for layer in chunk.decoder.layers])
        with torch.no_grad():
            for name, parameter in chunk.named_parameters():
                parameter.copy_(makers[name]())

    def _makers(self, layers: Sequence[int]) -> Mapping[str, Callable[[], Tensor]]:
        unembedding = EMBEDDING if self.architecture.tied_embeddings else UNEMBEDDING
        makers: dict[str, Callable[[], Tensor]] = {
            "embedding.word_embeddings.weight": lambda: self._vocabulary(EMBEDDING),
            "decoder.final_layernorm.weight": lambda: self._norm("model.norm.weight"),
            "output_layer.weight": lambda: self._vocabulary(unembedding),
        }
        for here, layer in enumerate(layers):
            for name, make in self._layer(f"model.layers.{layer}.").items():
                makers[f"decoder.layers.{here}.{name}"] = make
        return makers

    def _layer(self, source: str) -> Mapping[str, Callable[[], Tensor]]:
        attention, sizes = f"{source}self_attn.", self.architecture
        return {
            **self._feed_forward(f"{source}mlp."),
            "input_layernorm.weight": lambda: self._norm(f"{source}input_layernorm.weight"),
            "self_attention.linear_qkv.weight": lambda: self._query_key_value(attention),
            "self_attention.q_layernorm.weight": lambda: self._norm(f"{attention}q_norm.weight", sizes.head_size),
            "self_attention.k_layernorm.weight": lambda: self._norm(f"{attention}k_norm.weight", sizes.head_size),
            "self_attention.linear_proj.weight": lambda: self._columns(
                f"{attention}o_proj.weight", sizes.heads * sizes.head_size
            ),
            "pre_mlp_layernorm.weight": lambda: self._norm(f"{source}post_attention_layernorm.weight"),
        }

    def _feed_forward(self, source: str) -> Mapping[str, Callable[[], Tensor]]:
        mixture = self.architecture.mixture
        if mixture is None:
            return self._gated("mlp.", source, self.architecture.intermediate_size)
        makers: dict[str, Callable[[], Tensor]] = {
            "mlp.router.weight": lambda: self.checkpoint.part(
                f"{source}gate.weight", (mixture.experts, self.architecture.hidden_size), None, self.part
            )
        }
        for here, expert in enumerate(range(mixture.experts)[self.experts.of(mixture.experts)]):
            target = f"mlp.experts.local_experts.{here}."
            makers |= self._gated(target, f"{source}experts.{expert}.", mixture.intermediate_size)
        return makers

    def _gated(self, target: str, source: str, inner: int) -> Mapping[str, Callable[[], Tensor]]:
        return {
            f"{target}linear_fc1.weight": lambda: torch.cat(
                [self._rows(f"{source}{name}_proj.weight", inner) for name in ("gate", "up")]
            ),
            f"{target}linear_fc2.weight": lambda: self._columns(f"{source}down_proj.weight", inner),
        }

    def _query_key_value(self, attention: str) -> Tensor:
        sizes = self.architecture
        query, key, value = (
            self._rows(f"{attention}{name}_proj.weight", heads * sizes.head_size)
            for name, heads in (("q", sizes.heads), ("k", sizes.kv_heads), ("v", sizes.kv_heads))
        )
        return interleave_groups(query, key, value, key.shape[0] // sizes.head_size, dim=0)

    def _vocabulary(self, name: str) -> Tensor:
        """Return this rank's rows of a vocabulary tensor, with zeros after the end of the vocabulary."""
        rows = self._rows(name, self.architecture.vocab_size)
        width = self.part.width(self.architecture.vocab_size)
        return torch.cat([rows, rows.new_zeros(width - rows.shape[0], rows.shape[1])])

    def _rows(self, name: str, rows: int) -> Tensor:
        return self.checkpoint.part(name, (rows, self.architecture.hidden_size), 0, self.part)

    def _columns(self, name: str, columns: int) -> Tensor:
        return self.checkpoint.part(name, (self.architecture.hidden_size, columns), 1, self.part)

    def _norm(self, name: str, size: int | None = None) -> Tensor:
        return self.checkpoint.part(name, (size or self.architecture.hidden_size,), None, self.part)


def interleave_groups(query: Tensor, key: Tensor, value: Tensor, groups: int, *, dim: int) -> Tensor:
    """Arrange the queries, key and value of each group in sequence in dimension `dim`, as in Megatron's layer."""
    by_group = zip(*(tensor.chunk(groups, dim) for tensor in (query, key, value)), strict=True)
    return torch.cat([part for group in by_group for part in group], dim)
