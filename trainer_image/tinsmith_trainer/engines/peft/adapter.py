"""One adapter in memory: weights, gradients and Adam's moments, each a flat float32 buffer, or named arrays."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tinsmith_trainer.engines import adapters
from tinsmith_trainer.engines.adapters import (
    EXP_AVG,
    EXP_AVG_SQ,
    GRADIENTS,
    WEIGHTS,
    check_adam,
    check_norm,
    check_state,
    has_group,
    step_metrics,
)
from tinsmith_trainer.engines.base import AdamParams, AdapterState, LoraSpec
from tinsmith_trainer.engines.tensor_files import aligned_memory
from tinsmith_trainer.process.exit import fatal_on_error
from tinsmith_trainer.torch_model.loading import LoraLayer

# Views start at multiples of 64 bytes: BLAS may choose its kernel by alignment.
ALIGNMENT_FLOATS = 16

Arrays = Mapping[str, NDArray[np.float32]]


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """Where `<module>.lora_A` or `<module>.lora_B` lies in a flat buffer."""

    name: str
    offset: int
    shape: tuple[int, ...]

    @property
    def end(self) -> int:
        return self.offset + math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class AdapterLayout:
    """An adapter's tensors in their fixed order: modules by name, A before B."""

    modules: tuple[str, ...]
    slots: tuple[TensorSlot, ...]
    size: int

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {slot.name: slot.shape for slot in self.slots}

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        return {slot.name: flat[slot.offset : slot.end].view(slot.shape) for slot in self.slots}


def plan_layout(lora: LoraSpec, layers: Mapping[str, LoraLayer]) -> AdapterLayout:
    """The modules that the spec's families choose. Raises UserError if there are none, or none of one."""
    modules = adapters.trained_modules(lora, layers)
    adapters.check_families(lora, modules)
    slots, offset = [], 0
    for module in modules:
        for part, shape in zip(("lora_A", "lora_B"), layers[module].lora_shapes(lora.rank), strict=True):
            slots.append(TensorSlot(f"{module}.{part}", offset, shape))
            offset += math.ceil(math.prod(shape) / ALIGNMENT_FLOATS) * ALIGNMENT_FLOATS
    return AdapterLayout(modules, tuple(slots), offset)


class Adapter:
    """Weights to train, the gradient accumulated since the last step, and torch's AdamW over them.

    `gradients` and `moments` (exp_avg, exp_avg_sq) are flat like `weights`; None before the first.
    """

    def __init__(self, lora: LoraSpec, layout: AdapterLayout, device: torch.device) -> None:
        self.lora = lora
        self.layout = layout
        self.weights = nn.Parameter(torch.zeros(layout.size, device=device), requires_grad=False)
        self.views = layout.views(self.weights.data)
        self.gradients: Tensor | None = None
        self.step = 0
        self._optimizer = torch.optim.AdamW([self.weights], foreach=False)

    @property
    def scaling(self) -> float:
        return self.lora.alpha / self.lora.rank

    @property
    def moments(self) -> tuple[Tensor, Tensor] | None:
        state = self._optimizer.state.get(self.weights)
        return (state["exp_avg"], state["exp_avg_sq"]) if state else None

    def draw(self) -> None:
        """A from the spec's seed; B stays zero."""
        for name, drawn in adapters.draw(self.lora.seed, self.layout.shapes):
            self.views[name].copy_(drawn)

    def accumulate(self, scratch: Tensor) -> None:
        """Adds a succeeded call's gradient, flat; the buffer becomes the adapter's."""
        if self.gradients is None:
            self.gradients = scratch
        else:
            self.gradients += scratch

    def restore_optimizer(self, step: int, moments: tuple[Tensor, Tensor] | None) -> None:
        """Sets step and moments; None restarts them."""
        self.step = step
        self._optimizer.state.clear()
        if moments is not None:
            self._optimizer.state[self.weights] = {
                "step": torch.tensor(float(step)),
                "exp_avg": moments[0],
                "exp_avg_sq": moments[1],
            }

    def optim_step(self, params: AdamParams) -> dict[str, float]:
        """Clips and steps as torch does. Raises UserError, weights untouched, if the gradient is not finite."""
        check_adam(params)
        gradients = torch.zeros_like(self.weights.data) if self.gradients is None else self.gradients
        self.gradients = None
        norm = nn.utils.get_total_norm(list(self.layout.views(gradients).values()))
        check_norm(norm.item())
        self.weights.grad = gradients
        if params.grad_clip_norm > 0:
            nn.utils.clip_grads_with_norm_(self.weights, params.grad_clip_norm, norm)
        self._step(params)
        return step_metrics(norm.item(), params, self.step)

    def _step(self, params: AdamParams) -> None:
        self._optimizer.param_groups[0].update(
            lr=params.learning_rate,
            betas=(params.beta1, params.beta2),
            eps=params.eps,
            weight_decay=params.weight_decay,
        )
        # torch changes step, moments and weights one after the other. Where it stops in between, as for want of memory,
        # the adapter is neither as before nor as after. The next process takes both from the journal.
        with fatal_on_error("AdamW stopped in the middle of a step"):
            self._optimizer.step()
        self.weights.grad = None
        self.step += 1


def read_weights(adapter: Adapter) -> AdapterState:
    """A copy of the weights alone."""
    return AdapterState(adapter.lora, adapter.step, _copies(adapter, {WEIGHTS: adapter.weights.data}))


def read_state(adapter: Adapter) -> AdapterState:
    """A copy of everything."""
    flats = {WEIGHTS: adapter.weights.data}
    if adapter.moments is not None:
        flats |= dict(zip((EXP_AVG, EXP_AVG_SQ), adapter.moments, strict=True))
    if adapter.gradients is not None:
        flats[GRADIENTS] = adapter.gradients
    return AdapterState(adapter.lora, adapter.step, _copies(adapter, flats))


def _copies(adapter: Adapter, flats: Mapping[str, Tensor]) -> Arrays:
    tensors: dict[str, NDArray[np.float32]] = {}
    for group, flat in flats.items():
        # One contiguous copy a group; the arrays are views of it. numpy asks for huge pages, which PyTorch does not:
        # 370 MB take 0.03 s instead of 0.13 s, most of which the kernel spent on small ones.
        memory = np.frombuffer(aligned_memory(flat.numel() * flat.itemsize), np.float32)
        copied = torch.from_numpy(memory).copy_(flat.detach())
        tensors |= {f"{group}/{name}": view.numpy() for name, view in adapter.layout.views(copied).items()}
    return tensors


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
