"""Checks and wrappers for forwards in which the bits of a row do not depend on other rows.

In products (products.py) and experts (expert_products.py), rows are independent already. For other layers with
parameters, such as a convolution over time, rows are not independent: models with such layers share no forwards. Three
kinds of modules are wrapped: routers, which then take tokens in parts of one size; activations; and rotary embeddings.
With more than two threads PyTorch divides the elements of all rows among the threads. If a thread's share does not end
on a whole vector, scalar code computes the end of the share. The results of scalar code for sigmoid, exp, tanh and
cosine differ in the last bit (measured with 3, 4 and 8 threads).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Container
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from tinsmith_trainer.torch_model.experts import is_adaptable
from tinsmith_trainer.torch_model.lora import StackedLoraLinear, is_routed_apart
from tinsmith_trainer.torch_model.products import LEAST_PART_FLOATS, THREADS_WITHOUT_TAILS, padded_rows

ACTIVATIONS = ("torch.nn.modules.activation", "transformers.activations")
ROUTER_NAMES = ("Router", "MoEV1Gate")
"""Endings of class names in transformers, for classes that choose a token's experts."""
BY_TOKEN_ID = "HashRouter"
ROUTED_TOKENS = 64
"""The number of tokens in one call of a router.

For any number of experts, the scores of this number of tokens fill whole vectors.
"""
VECTOR_FLOATS = 64
"""The number of floats in an unrolled vector loop, on every CPU."""
ANGLES_TOKENS = 64
"""The number of tokens in a piece that only one thread computes, with up to 512 angles per token."""


def whole_vector_pieces(elements: int) -> list[int]:
    """Return sizes of pieces that PyTorch divides into whole vectors, for any number of threads."""
    threads = torch.get_num_threads()
    if threads <= THREADS_WITHOUT_TAILS:
        return [elements]
    even = _evenly_cut(elements, threads)
    return [even, elements - even] if even < elements else [elements]


def _evenly_cut(elements: int, threads: int) -> int:
    """Return the largest number of elements that PyTorch divides into whole vectors only."""
    for parts in range(min(threads, -(-elements // LEAST_PART_FLOATS)), 1, -1):
        even = elements - elements % (parts * VECTOR_FLOATS)
        if -(-even // LEAST_PART_FLOATS) >= parts:
            return even
    return min(elements, LEAST_PART_FLOATS)


class InWholeVectors(nn.Module):
    """An activation of x `[rows, ...]` in which the bits of an element do not depend on the position."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.activation = activation

    @override
    def forward(self, x: Tensor) -> Tensor:
        if not _may_have_tails():
            whole: Tensor = self.activation(x)
            return whole
        if x[0].numel() % VECTOR_FLOATS:
            return torch.cat([self.activation(row) for row in torch.split(x, 1)])
        flat = x.contiguous().view(-1)
        return torch.cat([self.activation(piece) for piece in torch.split(flat, whole_vector_pieces(len(flat)))]).view(
            x.shape
        )


def wrap_activations(model: nn.Module) -> None:
    """Wrap activations, rotary embeddings and routers of a model on the CPU.

    The kernels of other devices have no scalar remainders.
    """
    found = [(name, module) for name, module in model.named_modules() if _is_activation(module)]
    for name, module in found:
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, InWholeVectors(module))
    for module in model.modules():
        if type(module).__name__.endswith("RotaryEmbedding"):
            # In place: models access these modules' attributes.
            module.forward = functools.partial(_angles_in_pieces, module.forward)
        if is_router(module):
            module.forward = functools.partial(_routed_in_parts, module.forward)


def _angles_in_pieces(angles: Callable[..., Any], x: Tensor, position_ids: Tensor, *more: Any, **options: Any) -> Any:
    """Compute the angles of positions `[rows, length]` in pieces. Return one or more tensors `[rows, length, d]`."""
    if not _may_have_tails():
        return angles(x, position_ids, *more, **options)
    pieces = [angles(x, piece, *more, **options) for piece in torch.split(position_ids, ANGLES_TOKENS, 1)]
    if isinstance(pieces[0], Tensor):
        return torch.cat(pieces, 1)
    return tuple(torch.cat(parts, 1) for parts in zip(*pieces, strict=True))


def is_router(module: nn.Module) -> bool:
    """Return whether a module chooses experts by hidden states.

    A router that chooses by token IDs does not count.
    """
    name = type(module).__name__
    return name.endswith(ROUTER_NAMES) and not name.endswith(BY_TOKEN_ID)


def _routed_in_parts(router: Callable[..., Any], hidden_states: Tensor, *of_experts: Any) -> Any:
    """Route hidden states `[..., d]` in parts. The result is one or more tensors `[tokens, ...]`.

    Results in `of_experts`, for example a bias for each expert, have no dimension of tokens.
    """
    if not is_routed_apart():
        return router(hidden_states, *of_experts)
    tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
    parts = [
        _cut(router(padded_rows(part, ROUTED_TOKENS), *of_experts), len(part))
        for part in torch.split(tokens, ROUTED_TOKENS)
    ]
    if isinstance(parts[0], Tensor):
        return torch.cat(parts)
    return tuple(torch.cat(same) for same in zip(*parts, strict=True))


def _cut(routed: Any, tokens: int) -> Any:
    return routed[:tokens] if isinstance(routed, Tensor) else tuple(tensor[:tokens] for tensor in routed)


def _may_have_tails() -> bool:
    return torch.get_num_threads() > THREADS_WITHOUT_TAILS and is_routed_apart()


def keeps_rows_apart(decoder: nn.Module) -> bool:
    """Return whether all modules with parameters compute each token or row separately."""
    wrapped = {id(module.base) for module in decoder.modules() if isinstance(module, StackedLoraLinear)}
    return all(_is_apart(module, wrapped) for module in decoder.modules())


def _is_apart(module: nn.Module, wrapped: Container[int]) -> bool:
    has_own = next(module.parameters(recurse=False), None) is not None
    is_known = isinstance(module, nn.Embedding) or "Norm" in type(module).__name__ or id(module) in wrapped
    return is_known or not has_own or is_router(module) or is_adaptable(module)


def _is_activation(module: nn.Module) -> bool:
    has_parameters = next(module.parameters(), None) is not None
    return type(module).__module__ in ACTIVATIONS and not has_parameters
