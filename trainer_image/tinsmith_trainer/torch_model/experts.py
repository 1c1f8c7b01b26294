"""Adapters for the experts of a mixture. In transformers, one parameter holds a projection of all experts.

Each expert has a separate adapter, except for one factor that all experts of a layer share. One dimension of the shared
factor is the model's hidden size: The shared factor is A for projections that read the hidden state, and B for the
projection that writes the hidden state. Tinker trains these adapters, and Tinker's archives contain the adapters as
`experts.w1` (gate, or the only up projection), `experts.w3` (up) and `experts.w2` (down); see `get_lora_param_count`
and `weights` of tinker_cookbook. A router is never trained.

Transformers' models find the function for experts in a table of functions. This module adds the entry `tinsmith` to the
table. On the CPU each product takes a fixed number of one expert's tokens, so that a token's bits do not depend on the
routing of other tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from tinsmith_trainer.torch_model.expert_products import Assignment, FrozenWeight, by_all, by_expert
from tinsmith_trainer.torch_model.lora import OwnDelta, spans_of
from tinsmith_trainer.torch_model.products import LEAST_PART_FLOATS, THREADS_WITHOUT_TAILS, padded_rows

IMPLEMENTATION = "tinsmith"
GATE, UP, DOWN = "w1", "w3", "w2"
EXPERTS_NAME = "experts"


@dataclass(frozen=True, slots=True)
class ExpertProjection:
    """A projection of all experts of a layer. `is_down`: the projection writes the hidden state."""

    key: str
    experts: int
    in_features: int
    out_features: int
    is_down: bool

    def lora_shapes(self, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shapes of A `[experts or 1, rank, d_in]` and B `[experts or 1, d_out, rank]`."""
        own_A, own_B = (self.experts, 1) if self.is_down else (1, self.experts)
        return (own_A, rank, self.in_features), (own_B, self.out_features, rank)


def expert_projections(model: nn.Module) -> dict[str, ExpertProjection]:
    """Return the projections of every layer's experts by name, in model order."""
    found: dict[str, ExpertProjection] = {}
    for name, module in model.named_modules():
        if is_adaptable(module):
            found |= _projections(name, module)
    return found


def adapt_experts(model: nn.Module) -> dict[str, ExpertProjection]:
    """Install Tinsmith's function for the experts of every layer, and return the projections of the experts."""
    for name, module in model.named_modules():
        if is_adaptable(module):
            module.config._experts_implementation = IMPLEMENTATION
            module.tinsmith_key = name
    return expert_projections(model)


def is_adaptable(module: nn.Module) -> bool:
    """Return whether a module holds a layer's experts in the form that transformers' table of functions requires."""
    weights = {*dict(module.named_parameters(recurse=False)), *getattr(module, "quantized_weights", ())}
    has_up = "gate_up_proj" in weights or "up_proj" in weights
    return hasattr(module, "is_transposed") and has_up and "down_proj" in weights


def unadaptable_experts(model: nn.Module) -> tuple[str, ...]:
    """Return the names of modules that hold experts in parameters of three dimensions, but in an unsupported form."""
    return tuple(
        name
        for name, module in model.named_modules()
        if name.rpartition(".")[2] == EXPERTS_NAME and not is_adaptable(module)
        if any(weight.ndim == 3 for weight in module.parameters(recurse=False))
    )


def merge_into_experts(module: Any, deltas: Mapping[str, Tensor]) -> None:
    """Add deltas `[experts, d_out, d_in]`, by the keys `w1`, `w2` and `w3`, to a layer's expert weights in place."""
    for parts, name in (((GATE, UP) if module.has_gate else (GATE,), _up_name(module)), ((DOWN,), "down_proj")):
        found = [deltas[part] for part in parts if part in deltas]
        if found:
            joined = _joined(found, dim=1, is_concatenated=module.is_concatenated)
            weight = getattr(module, name).data
            weight.copy_(weight.float() + (joined.mT if module.is_transposed else joined))


def _up_name(module: Any) -> str:
    return "gate_up_proj" if module.has_gate else "up_proj"


def _projections(name: str, module: Any) -> dict[str, ExpertProjection]:
    experts, down_in, down_out = _sizes(module.down_proj, module)
    ups = (GATE, UP) if module.has_gate else (GATE,)
    projections = [ExpertProjection(f"{name}.{up}", experts, down_out, down_in, is_down=False) for up in ups]
    projections.append(ExpertProjection(f"{name}.{DOWN}", experts, down_in, down_out, is_down=True))
    return {projection.key: projection for projection in projections}


def _sizes(weight: Tensor, module: Any) -> tuple[int, int, int]:
    """Return the number of experts, d_in and d_out."""
    experts, one, other = weight.shape
    return (experts, one, other) if module.is_transposed else (experts, other, one)


def _experts(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Compute the output of a layer's experts.

    Each row of the hidden states `[tokens, d]` has k experts and k weights.
    """
    sent = Assignment.of(top_k_index, len(module.down_proj))
    up = _base(module, _up_name(module), sent.to_experts(hidden_states), sent)
    inner = _activated(module, _added(up, _up_deltas(module, hidden_states, sent)))
    out = _added(_base(module, "down_proj", inner, sent), _down_deltas(module, inner, sent))
    if getattr(module, "has_post_expert_norm", False):  # missing in transformers 5.8, which NeMo RL's image has
        out = module.post_expert_norm(out)
    return sent.weighted_sum(out, top_k_weights).to(hidden_states.dtype)


ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, _experts)


def _base(module: Any, name: str, rows: Tensor, sent: Assignment) -> Tensor:
    product = by_expert(rows, _weight(module, name), sent.counts)
    return product + getattr(module, f"{name}_bias")[sent.experts] if module.has_bias else product


def _weight(module: Any, name: str) -> Tensor | FrozenWeight:
    """Return `[experts, d_out, d_in]`."""
    if name in (held := getattr(module, "quantized_weights", {})):
        return FrozenWeight(held[name], module.is_transposed)
    weight: Tensor = getattr(module, name)
    return weight.mT if module.is_transposed else weight


def _activated(module: Any, up: Tensor) -> Tensor:
    """Apply the activation in parts.

    Each part is computed by one thread. If threads shared a part, the elements at the end of a thread's share would
    have other bits (see rows.py).
    """
    activation = module._apply_gate if module.has_gate else module.act_fn
    if up.device.type != "cpu" or torch.get_num_threads() <= THREADS_WITHOUT_TAILS:
        whole: Tensor = activation(up)
        return whole
    rows = max(1, LEAST_PART_FLOATS // up.shape[1])
    return torch.cat([activation(padded_rows(part, rows))[: len(part)] for part in torch.split(up, rows)])


Delta = tuple[Tensor, Tensor]
"""A delta: rows `[some, d]`, and the positions of these rows among all rows."""


def _added(rows: Tensor, deltas: list[Delta]) -> Tensor:
    """Add deltas to rows. No two deltas share a row."""
    if not deltas:
        return rows
    places, values = (torch.cat(parts) for parts in zip(*deltas, strict=True))
    if len(deltas) == 1 and len(places) == len(rows):
        return rows + values.to(rows.dtype)
    return rows + torch.zeros_like(rows).index_copy(0, places, values.to(rows.dtype))


def _up_deltas(module: Any, hidden_states: Tensor, sent: Assignment) -> list[Delta]:
    """Return the deltas for the input of the activation, in the layout of the base model's product."""
    deltas = []
    for start, end, owns in _spans(module, (GATE, UP) if module.has_gate else (GATE,), len(hidden_states)):
        own, places = sent.part(start, end)
        parts = [_up_delta(hidden_states[start:end], adapter, own) for adapter in owns]
        deltas.append((places, _joined(parts, dim=1, is_concatenated=module.is_concatenated)))
    return deltas


def _up_delta(x: Tensor, adapter: OwnDelta, sent: Assignment) -> Tensor:
    """Compute one adapter's delta. All experts share A, so each token is multiplied with A only once."""
    down = by_all(x, adapter.lora_A) * adapter.scale
    return by_expert(sent.to_experts(down), adapter.lora_B, sent.counts)


def _joined(parts: list[Tensor], *, dim: int, is_concatenated: bool) -> Tensor:
    """Join gate and up, concatenated or interleaved, into one tensor that is twice as long in a dimension."""
    if is_concatenated or len(parts) == 1:
        return torch.cat(parts, dim)
    return torch.stack(parts, dim + 1).flatten(dim, dim + 1)


def _down_deltas(module: Any, inner: Tensor, sent: Assignment) -> list[Delta]:
    deltas = []
    for start, end, (adapter,) in _spans(module, (DOWN,), sent.tokens):
        own, places = sent.part(start, end)
        down = by_expert(inner[places], adapter.lora_A, own.counts) * adapter.scale
        deltas.append((places, by_all(down, adapter.lora_B)))
    return deltas


def _spans(module: Any, parts: Sequence[str], tokens: int) -> Iterator[tuple[int, int, tuple[OwnDelta, ...]]]:
    """Yield the token range and the deltas of each routed adapter.

    An adapter has deltas for all projections of a layer's experts, or for no projection.
    """
    for spans in zip(*(spans_of(f"{module.tinsmith_key}.{part}", tokens) for part in parts), strict=True):
        yield spans[0].start, spans[0].end, tuple(span.own for span in spans)
