"""Adapters that wait in host memory while another one is in the model.

Waiting adapters are flat: one tensor for all weights, and one for each of Adam's moments, so that a switch takes a few
copies between host and device, and not thousands.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Parked:
    """A rank's share of one adapter in the model and optimizer, on the host.

    `model`: the rank's parameters in their own type. `masters`: the float32 values that the optimizer steps, None if
    those are the parameters themselves. `moments`: exp_avg and exp_avg_sq, None before the first step. Masters and
    moments are those of the rank's optimizer; with the distributed optimizer, a shard.
    """

    model: Tensor
    masters: Tensor | None
    moments: tuple[Tensor, Tensor] | None


@dataclass(slots=True)
class AdapterSlot:
    """An adapter of a rank. `parked` is None while the adapter is in the model.

    `gradients` were accumulated since the last step, flat and float32, on the model's device while the adapter is in
    the model; None if there are none.
    """

    step: int
    has_moments: bool
    gradients: Tensor | None
    parked: Parked | None

    def add(self, gradients: Tensor) -> None:
        """Add a call's gradients. The slot takes ownership."""
        if self.gradients is None:
            self.gradients = gradients
        else:
            self.gradients += gradients

    def take_gradients(self) -> Tensor | None:
        gradients, self.gradients = self.gradients, None
        return gradients


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """Return a flat copy of tensors of one type and device, in order."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors]) if tensors else torch.empty(0)


def unpack(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Set tensors from the flat result of `pack`, on any device."""
    if tensors:
        targets = [tensor.detach() for tensor in tensors]
        torch._foreach_copy_(targets, split(flat.to(targets[0].device, non_blocking=True), targets))


def split(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return views of `flat` in the shapes of `tensors`."""
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def to_host(flat: Tensor) -> Tensor:
    """Copy to the host. Memory from a GPU is pinned for a fast copy back. A host tensor is returned unchanged."""
    if not flat.is_cuda:
        return flat
    return torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True).copy_(flat)
