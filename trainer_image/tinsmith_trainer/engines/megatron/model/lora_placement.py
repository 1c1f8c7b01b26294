"""Where LoRA stands in Megatron's GPT model: which fused layer is which projections of the transformers model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tinsmith_trainer.engines.megatron.model.architecture import Architecture
from tinsmith_trainer.engines.megatron.model.expert_lora import ExpertSizes, ExpertsLora, place_experts
from tinsmith_trainer.engines.megatron.model.lora import (
    COLUMNS,
    ROWS,
    AdaptedLayer,
    Join,
    MegatronLora,
    ParallelLora,
    Projection,
)
from tinsmith_trainer.engines.megatron.model.weights import Part, interleave_groups


@dataclass(frozen=True, slots=True)
class _Placing:
    architecture: Architecture
    part: Part
    experts: Part
    max_rank: int

    def place(
        self, owner: Any, child: str, projections: Sequence[Projection], split: int, join: Join | None = None
    ) -> ParallelLora:
        layer = ParallelLora(
            getattr(owner, child), projections, split=split, part=self.part, max_rank=self.max_rank, join=join
        )
        setattr(owner, child, layer)
        return layer

    def layer(self, layer: Any) -> list[AdaptedLayer]:
        """All linear layers of a transformer layer, which knows its number in the whole model, from 1."""
        name = f"model.layers.{layer.layer_number - 1}."
        return [*self._attention(layer, f"{name}self_attn."), *self._feed_forward(layer, name)]

    def _attention(self, layer: Any, attention: str) -> list[ParallelLora]:
        sizes = self.architecture
        hidden, query, key_value = sizes.hidden_size, sizes.heads * sizes.head_size, sizes.kv_heads * sizes.head_size
        fused = [
            Projection(f"{attention}q_proj", hidden, query),
            Projection(f"{attention}k_proj", hidden, key_value),
            Projection(f"{attention}v_proj", hidden, key_value),
        ]
        return [
            self.place(layer.self_attention, "linear_qkv", fused, ROWS, self._join_groups),
            self.place(layer.self_attention, "linear_proj", [Projection(f"{attention}o_proj", query, hidden)], COLUMNS),
        ]

    def _feed_forward(self, layer: Any, name: str) -> list[AdaptedLayer]:
        hidden, inner, mixture = (
            self.architecture.hidden_size,
            self.architecture.intermediate_size,
            self.architecture.mixture,
        )
        if mixture is not None:
            sizes = ExpertSizes(mixture.experts, hidden, mixture.intermediate_size)
            lora = ExpertsLora(f"{name}mlp.experts", sizes, self.experts, self.max_rank, like=torch.empty(0))
            place_experts(layer.mlp.experts, lora)
            return [lora]
        mlp = f"{name}mlp."
        gated = [Projection(f"{mlp}gate_proj", hidden, inner), Projection(f"{mlp}up_proj", hidden, inner)]
        return [
            self.place(layer.mlp, "linear_fc1", gated, ROWS, _side_by_side),
            self.place(layer.mlp, "linear_fc2", [Projection(f"{mlp}down_proj", inner, hidden)], COLUMNS),
        ]

    def _join_groups(self, outputs: Sequence[Tensor]) -> Tensor:
        query, key, value = outputs
        return interleave_groups(query, key, value, self.architecture.kv_heads // self.part.count, dim=-1)


def _side_by_side(outputs: Sequence[Tensor]) -> Tensor:
    return torch.cat(tuple(outputs), dim=-1)


def place_lora(chunk: Any, architecture: Architecture, part: Part, experts: Part, max_rank: int) -> MegatronLora:
    """Wraps every linear layer of a GPTModel's pipeline stage in place. `part` is a tensor rank's, `experts` which of
    a mixture's experts are here.
    """
    placing = _Placing(architecture, part, experts, max_rank)
    layers: list[AdaptedLayer] = [placed for layer in chunk.decoder.layers for placed in placing.layer(layer)]
    if chunk.post_process:
        unembedding = Projection("lm_head", architecture.hidden_size, architecture.vocab_size)
        layers.append(placing.place(chunk, "output_layer", [unembedding], ROWS))
    return MegatronLora(layers)
