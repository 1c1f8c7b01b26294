"""Adapters that wait in host memory while another adapter is in the model, and copies of them for a shared forward.

A waiting adapter is flat: one tensor holds all weights, and one tensor holds each of Adam's moments. So a switch of
adapters takes only a few copies between host and device, not thousands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tinsmith_trainer.engines.megatron.step.tensor_parts import Tensors


@dataclass(frozen=True, slots=True)
class Parked:
    """A rank's share of one adapter, copied from the model and the optimizer to the host.

    `model`: the rank's parameters in the model's dtype. `masters`: the float32 values that the optimizer changes, or
    None if the parameters themselves are float32. `moments`: exp_avg and exp_avg_sq, None before the first step.
    Masters and moments belong to the rank's optimizer. With the distributed optimizer, masters and moments are shards.
    """

    model: Tensor
    masters: Tensor | None
    moments: tuple[Tensor, Tensor] | None


@dataclass(slots=True)
class AdapterSlot:
    """An adapter of a rank. `parked` is None while the adapter is in the model.

    `gradients` are the gradients since the last step, flat and float32, or None. Gradients are on the model's device
    while the adapter is in the model.
    """

    step: int
    has_moments: bool
    gradients: Tensor | None
    parked: Parked | None

    def add(self, gradients: Tensor) -> None:
        """Add a call's gradients. The slot takes ownership of the tensor."""
        if self.gradients is None:
            self.gradients = gradients
        else:
            self.gradients += gradients

    def take_gradients(self) -> Tensor | None:
        gradients, self.gradients = self.gradients, None
        return gradients


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """Copy tensors of one type and device, in order, into one flat tensor."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors]) if tensors else torch.empty(0)


def unpack(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Set tensors from a flat tensor that `pack` returned, on any device."""
    if tensors:
        targets = [tensor.detach() for tensor in tensors]
        torch._foreach_copy_(targets, split(flat.to(targets[0].device, non_blocking=True), targets))


def split(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return views of `flat` in the shapes of `tensors`."""
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def to_host(flat: Tensor) -> Tensor:
    """Copy to the host. Memory for values from a GPU is pinned, so that the copy back to the GPU is fast.

    A host tensor is returned unchanged.
    """
    if not flat.is_cuda:
        return flat
    return torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True).copy_(flat)


class LentAdapter:
    """A copy of an adapter's weights on the model's device, and the sum of its gradients in float32.

    `tensors` has the names and shapes of the rank's parameters. `gradients` is flat, and None without backward.
    """

    def __init__(self, weights: Tensor, names: Sequence[str], like: Sequence[Tensor], *, trains: bool) -> None:
        parts = [part.detach().requires_grad_(trains) for part in split(weights, like)]
        self.tensors: Tensors = dict(zip(names, parts, strict=True))
        self.gradients = torch.zeros_like(weights, dtype=torch.float32) if trains else None
        if self.gradients is not None:
            for part, gradient in zip(parts, split(self.gradients, like), strict=True):
                part.register_post_accumulate_grad_hook(_adder(gradient))  # type: ignore[no-untyped-call]


def _adder(total: Tensor) -> Callable[[Tensor], None]:
    """Return a hook that adds a microbatch's gradient in float32, as Megatron adds a parameter's gradient."""

    def add(part: Tensor) -> None:
        assert part.grad is not None
        total.add_(part.grad)
        part.grad = None

    return add
