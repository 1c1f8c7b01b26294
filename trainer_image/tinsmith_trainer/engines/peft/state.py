"""An adapter to named numpy tensors and back, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tinsmith_trainer.engines.base import AdapterState
from tinsmith_trainer.engines.peft.adapter import Adapter, AdapterLayout
from tinsmith_trainer.engines.states import EXP_AVG, EXP_AVG_SQ, GRADIENTS, WEIGHTS, check_state, has_group

Arrays = Mapping[str, NDArray[np.float32]]


def read_state(adapter: Adapter) -> AdapterState:
    """A copy of everything."""
    flats = {WEIGHTS: adapter.weights.data}
    if adapter.moments is not None:
        flats |= dict(zip((EXP_AVG, EXP_AVG_SQ), adapter.moments, strict=True))
    if adapter.gradients is not None:
        flats[GRADIENTS] = adapter.gradients
    tensors: dict[str, NDArray[np.float32]] = {}
    for group, flat in flats.items():
        # One contiguous copy a group; the arrays are views of it.
        copied = flat.detach().to("cpu", copy=True)
        tensors |= {f"{group}/{name}": view.numpy() for name, view in adapter.layout.views(copied).items()}
    return AdapterState(adapter.lora, adapter.step, tensors)


def write_state(adapter: Adapter, state: AdapterState, *, with_optimizer: bool) -> None:
    """Sets a new adapter. Raises CheckpointInvalid when the tensors are not those of the adapter's layout."""
    device = adapter.weights.device
    check_state(state, adapter.layout.shapes)
    adapter.weights.data.copy_(_flat(state.tensors, WEIGHTS, adapter.layout, device))
    if not with_optimizer:
        return
    if has_group(state, EXP_AVG):
        moments = tuple(_flat(state.tensors, group, adapter.layout, device) for group in (EXP_AVG, EXP_AVG_SQ))
        adapter.restore_optimizer(state.optimizer_step, (moments[0], moments[1]))
    if has_group(state, GRADIENTS):
        adapter.accumulate(_flat(state.tensors, GRADIENTS, adapter.layout, device))


def _flat(tensors: Arrays, group: str, layout: AdapterLayout, device: torch.device) -> Tensor:
    flat = torch.zeros(layout.size)
    for name, view in layout.views(flat).items():
        view.numpy()[...] = tensors[f"{group}/{name}"]
    return flat.to(device)
