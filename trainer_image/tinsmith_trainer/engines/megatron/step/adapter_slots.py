"""Adapters that wait in host memory while another one is in the model.

What waits is flat: one tensor for all weights, one for each of Adam's moments, so that a switch is a handful of
copies between host and device and not thousands.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Parked:
    """What a rank's model and optimizer hold of one adapter, on the host.

    `model`: the rank's parameters in their own type. `masters`: the float32 values that the optimizer steps, None where
    those are the parameters themselves. `moments`: exp_avg and exp_avg_sq, None before the first step. Of masters and
    moments a rank has what its optimizer has: with the distributed optimizer, a shard.
    """

    model: Tensor
    masters: Tensor | None
    moments: tuple[Tensor, Tensor] | None


@dataclass(slots=True)
class AdapterSlot:
    """One adapter of a rank. `parked` is None while the adapter is in the model.

    `gradients` is what was accumulated since the last step, flat and float32, on the model's device while the adapter
    is in the model; None where nothing was.
    """

    step: int
    has_moments: bool
    gradients: Tensor | None
    parked: Parked | None

    def add(self, gradients: Tensor) -> None:
        """Takes a call's gradients, which become the slot's."""
        if self.gradients is None:
            self.gradients = gradients
        else:
            self.gradients += gradients

    def take_gradients(self) -> Tensor | None:
        gradients, self.gradients = self.gradients, None
        return gradients


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """A flat copy of tensors of one type and device, in their order."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors]) if tensors else torch.empty(0)


def unpack(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Sets tensors from what `pack` made of them, whatever device it is on now."""
    if tensors:
        targets = [tensor.detach() for tensor in tensors]
        torch._foreach_copy_(targets, split(flat.to(targets[0].device, non_blocking=True), targets))


def split(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Views of `flat` in the shapes of `tensors`."""
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def to_host(flat: Tensor) -> Tensor:
    """Pinned where it comes from a GPU, so that it goes back at the bus's speed. A tensor of the host stays itself."""
    if not flat.is_cuda:
        return flat
    return torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True).copy_(flat)
