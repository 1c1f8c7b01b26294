"""An adapter to named numpy tensors and back, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tinsmith_trainer.engines.base import AdapterState
from tinsmith_trainer.engines.peft.adapter import Adapter, AdapterLayout
from tinsmith_trainer.errors import CheckpointInvalid

WEIGHTS, GRADIENTS = "weights", "gradients"
EXP_AVG, EXP_AVG_SQ = "adam/exp_avg", "adam/exp_avg_sq"

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
    _check_names(state, adapter.layout)
    adapter.weights.data.copy_(_flat(state.tensors, WEIGHTS, adapter.layout, device))
    if not with_optimizer:
        return
    if _has(state, EXP_AVG):
        moments = tuple(_flat(state.tensors, group, adapter.layout, device) for group in (EXP_AVG, EXP_AVG_SQ))
        adapter.restore_optimizer(state.optimizer_step, (moments[0], moments[1]))
    if _has(state, GRADIENTS):
        adapter.accumulate(_flat(state.tensors, GRADIENTS, adapter.layout, device))


def _has(state: AdapterState, group: str) -> bool:
    return any(name.startswith(f"{group}/") for name in state.tensors)


def _flat(tensors: Arrays, group: str, layout: AdapterLayout, device: torch.device) -> Tensor:
    flat = torch.zeros(layout.size)
    for name, view in layout.views(flat).items():
        array = tensors[f"{group}/{name}"]
        if array.shape != view.shape:
            raise CheckpointInvalid(
                f"The saved tensor {group}/{name} has shape {list(array.shape)}, this base model needs "
                f"{list(view.shape)}: the checkpoint is of another base model or rank."
            )
        view.numpy()[...] = array
    return flat.to(device)


def _check_names(state: AdapterState, layout: AdapterLayout) -> None:
    groups = [WEIGHTS, *(group for group in (EXP_AVG, EXP_AVG_SQ, GRADIENTS) if _has(state, group))]
    if (EXP_AVG in groups) != (EXP_AVG_SQ in groups) or (state.optimizer_step > 0 and EXP_AVG not in groups):
        raise CheckpointInvalid(
            f"The saved optimizer state of step {state.optimizer_step} lacks one or both of Adam's moments."
        )
    expected = {f"{group}/{slot.name}" for group in groups for slot in layout.slots}
    if missing := expected - set(state.tensors):
        raise CheckpointInvalid(f"The saved adapter lacks {_some(missing)}: it is of another base model or incomplete.")
    if extra := set(state.tensors) - expected:
        raise CheckpointInvalid(f"The saved adapter holds {_some(extra)}, which this base model does not have.")


def _some(names: set[str]) -> str:
    first = sorted(names)[:3]
    return ", ".join(first) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
