"""Whether the rows of a forward keep to themselves, to the last bit, whoever is in it.

Products do (products.py), and experts (expert_products.py). What is left are other layers with parameters, such as a
convolution over time: where there is one, a model's forwards are of one call alone. Wrapped are routers, which take
tokens by parts of one size; activations; and what turns positions into angles: beyond two
threads PyTorch cuts the elements of all rows into as many parts as there are threads, and where a part ends without
filling its vectors it takes scalar code, whose sigmoid, exp, tanh and cosine differ in the last bit (measured with 3, 4
and 8 threads).
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
from tinsmith_trainer.torch_model.products import LEAST_PART_FLOATS, THREADS_WITHOUT_TAILS, filled_up

ACTIVATIONS = ("torch.nn.modules.activation", "transformers.activations")
ROUTER_NAMES = ("Router", "MoEV1Gate")
"""Of the classes of transformers whose instances say which experts a token goes to."""
BY_TOKEN_ID = "HashRouter"
ROUTED_TOKENS = 64
"""What a router takes at once: of any number of experts so many scores are whole vectors."""
VECTOR_FLOATS = 64
"""Whole vectors, unrolled, on every CPU."""
ANGLES_TOKENS = 64
"""Few enough for one thread, with up to 512 angles each."""


def whole_vector_pieces(elements: int) -> list[int]:
    """Sizes of pieces that PyTorch cuts into whole vectors, however many threads there are; of whole vectors itself."""
    threads = torch.get_num_threads()
    if threads <= THREADS_WITHOUT_TAILS:
        return [elements]
    even = _evenly_cut(elements, threads)
    return [even, elements - even] if even < elements else [elements]


def _evenly_cut(elements: int, threads: int) -> int:
    """The most of them whose parts are of whole vectors."""
    for parts in range(min(threads, -(-elements // LEAST_PART_FLOATS)), 1, -1):
        even = elements - elements % (parts * VECTOR_FLOATS)
        if -(-even // LEAST_PART_FLOATS) >= parts:
            return even
    return min(elements, LEAST_PART_FLOATS)


class InWholeVectors(nn.Module):
    """An activation of x `[rows, ...]`, of which each element has the same bits wherever it lies."""

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
    """And angles of positions, and routers. Of a model on the CPU: other devices' kernels have no such tails."""
    found = [(name, module) for name, module in model.named_modules() if _is_activation(module)]
    for name, module in found:
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, InWholeVectors(module))
    for module in model.modules():
        if type(module).__name__.endswith("RotaryEmbedding"):
            # In place: models look into these modules.
            module.forward = functools.partial(_angles_in_pieces, module.forward)
        if is_router(module):
            module.forward = functools.partial(_routed_in_parts, module.forward)


def _angles_in_pieces(angles: Callable[..., Any], x: Tensor, position_ids: Tensor, *more: Any, **options: Any) -> Any:
    """What `angles` makes of positions `[rows, length]`: a tensor `[rows, length, d]`, or several."""
    if not _may_have_tails():
        return angles(x, position_ids, *more, **options)
    pieces = [angles(x, piece, *more, **options) for piece in torch.split(position_ids, ANGLES_TOKENS, 1)]
    if isinstance(pieces[0], Tensor):
        return torch.cat(pieces, 1)
    return tuple(torch.cat(parts, 1) for parts in zip(*pieces, strict=True))


def is_router(module: nn.Module) -> bool:
    """One that looks at hidden states alone: a router by token ids is a layer of another kind."""
    name = type(module).__name__
    return name.endswith(ROUTER_NAMES) and not name.endswith(BY_TOKEN_ID)


def _routed_in_parts(router: Callable[..., Any], hidden_states: Tensor, *of_experts: Any) -> Any:
    """What a router makes of hidden states `[..., d]`: a tensor `[tokens, ...]`, or several.

    `of_experts`: a bias for each expert, say, and nothing of tokens.
    """
    if not is_routed_apart():
        return router(hidden_states, *of_experts)
    tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
    parts = [
        _cut(router(filled_up(part, ROUTED_TOKENS), *of_experts), len(part))
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
    """Whether all that has parameters works on each token or row by itself: norms, embeddings and wrapped layers."""
    wrapped = {id(module.base) for module in decoder.modules() if isinstance(module, StackedLoraLinear)}
    return all(_is_apart(module, wrapped) for module in decoder.modules())


def _is_apart(module: nn.Module, wrapped: Container[int]) -> bool:
    has_own = next(module.parameters(recurse=False), None) is not None
    is_known = isinstance(module, nn.Embedding) or "Norm" in type(module).__name__ or id(module) in wrapped
    return is_known or not has_own or is_router(module) or is_adaptable(module)


def _is_activation(module: nn.Module) -> bool:
    has_parameters = next(module.parameters(), None) is not None
    return type(module).__module__ in ACTIVATIONS and not has_parameters
