"""Whether the rows of a forward keep to themselves, to the last bit, whoever is in it.

Products do (products.py). What is left are the layers that LoRA does not cover, and activations. A router and its
experts compute all tokens of a forward together, and a projection that is not wrapped is one product of all rows: such
a model's forwards are of one call alone. Activations are wrapped, and what turns positions into angles: beyond two
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

from tinsmith_trainer.torch_model.lora import StackedLoraLinear, is_routed_apart

ACTIVATIONS = ("torch.nn.modules.activation", "transformers.activations")
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
THREADS_WITHOUT_TAILS = 2
"""Halves of rows of whole vectors are whole vectors."""
VECTOR_FLOATS = 64
"""Whole vectors, unrolled, on every CPU."""
LEAST_PART_FLOATS = 32_768
"""What PyTorch gives a thread at least: at::internal::GRAIN_SIZE."""
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
    """And angles of positions. Of a model on the CPU: other devices' kernels have no such tails."""
    found = [(name, module) for name, module in model.named_modules() if _is_activation(module)]
    for name, module in found:
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, InWholeVectors(module))
    for module in model.modules():
        if type(module).__name__.endswith("RotaryEmbedding"):
            # In place: models look into these modules.
            module.forward = functools.partial(_angles_in_pieces, module.forward)


def _angles_in_pieces(angles: Callable[..., Any], x: Tensor, position_ids: Tensor, *more: Any, **options: Any) -> Any:
    """What `angles` makes of positions `[rows, length]`: a tensor `[rows, length, d]`, or several."""
    if not _may_have_tails():
        return angles(x, position_ids, *more, **options)
    pieces = [angles(x, piece, *more, **options) for piece in torch.split(position_ids, ANGLES_TOKENS, 1)]
    if isinstance(pieces[0], Tensor):
        return torch.cat(pieces, 1)
    return tuple(torch.cat(parts, 1) for parts in zip(*pieces, strict=True))


def _may_have_tails() -> bool:
    return torch.get_num_threads() > THREADS_WITHOUT_TAILS and is_routed_apart()


def keeps_rows_apart(decoder: nn.Module, config: object) -> bool:
    """Whether all that has parameters works on each token or row by itself: norms, embeddings and wrapped layers."""
    if any(getattr(config, name, None) for name in EXPERT_COUNTS):
        return False
    wrapped = {id(module.base) for module in decoder.modules() if isinstance(module, StackedLoraLinear)}
    return all(_is_apart(module, wrapped) for module in decoder.modules())


def _is_apart(module: nn.Module, wrapped: Container[int]) -> bool:
    has_own = next(module.parameters(recurse=False), None) is not None
    is_known = isinstance(module, nn.Embedding) or "Norm" in type(module).__name__ or id(module) in wrapped
    return is_known or not has_own


def _is_activation(module: nn.Module) -> bool:
    has_parameters = next(module.parameters(), None) is not None
    return type(module).__module__ in ACTIVATIONS and not has_parameters
