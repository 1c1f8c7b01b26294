"""An adapter in memory: its weights, gradients and Adam's moments in flat buffers, and copies of its state."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
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
    """The position of `<module>.lora_A` or `<module>.lora_B` in a flat buffer."""

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
    slots: Mapping[str, TensorSlot]
    size: int

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: slot.shape for name, slot in self.slots.items()}

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        return {name: self.view(flat, name) for name in self.slots}

    def view(self, flat: Tensor, name: str) -> Tensor:
        slot = self.slots[name]
        return flat[slot.offset : slot.end].view(slot.shape)

    def runs(self, names: Container[str]) -> Sequence[Sequence[tuple[TensorSlot, int]]]:
        """Return the slots of these names in runs without gaps, each slot with the offset of the next."""
        runs: list[list[tuple[TensorSlot, int]]] = [[]]
        slots = list(self.slots.values())
        ends = [*(slot.offset for slot in slots[1:]), self.size]
        for slot, end in zip(slots, ends, strict=True):
            if slot.name in names:
                runs[-1].append((slot, end))
            elif runs[-1]:
                runs.append([])
        return [run for run in runs if run]

    def stacked_views(self, flats: Tensor) -> dict[str, Tensor]:
        """Return views `[adapters, ...]` of the flat buffers `[adapters, size]` of adapters with this layout."""
        return {
            name: flats[:, slot.offset : slot.end].view((len(flats), *slot.shape)) for name, slot in self.slots.items()
        }


def plan_layout(lora: LoraSpec, layers: Mapping[str, LoraLayer]) -> AdapterLayout:
    """Lay out the modules of the spec's families. Raises UserError if a family has no modules."""
    modules = adapters.trained_modules(lora, layers)
    adapters.check_families(lora, modules)
    slots, offset = {}, 0
    for module in modules:
        for part, shape in zip(("lora_A", "lora_B"), layers[module].lora_shapes(lora.rank), strict=True):
            slot = TensorSlot(f"{module}.{part}", offset, shape)
            slots[slot.name] = slot
            offset += math.ceil(math.prod(shape) / ALIGNMENT_FLOATS) * ALIGNMENT_FLOATS
    return AdapterLayout(modules, slots, offset)


class Adapter:
    """Weights to train, the gradients accumulated since the last step, and torch's AdamW over them.

    `gradients` and `moments` (exp_avg, exp_avg_sq) are flat like `weights`, and None before the first call or step.
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
        """Draw A from the spec's seed. B stays zero."""
        for name, drawn in adapters.draw(self.lora.seed, self.layout.shapes):
            self.views[name].copy_(drawn)

    def accumulate(self, scratch: Tensor) -> None:
        """Add the flat gradient of a successful call. The adapter takes ownership of the buffer."""
        if self.gradients is None:
            self.gradients = scratch
        else:
            self.gradients += scratch

    def restore_optimizer(self, step: int, moments: tuple[Tensor, Tensor] | None) -> None:
        """Set step and moments; None restarts them."""
        self.step = step
        self._optimizer.state.clear()
        if moments is not None:
            self._optimizer.state[self.weights] = {
                "step": torch.tensor(float(step)),
                "exp_avg": moments[0],
                "exp_avg_sq": moments[1],
            }

    def optim_step(self, params: AdamParams) -> dict[str, float]:
        """Clip and step as torch does. Raises UserError, with weights unchanged, if the gradient is not finite."""
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
        # torch changes step, moments and weights in sequence. If it fails in between, for example out of memory, the
        # adapter is inconsistent. The next process restores it from the journal.
        with fatal_on_error("AdamW failed in the middle of a step"):
            self._optimizer.step()
        self.weights.grad = None
        self.step += 1


def read_weights(adapter: Adapter) -> AdapterState:
    """Return a copy of the weights only."""
    return AdapterState(adapter.lora, adapter.step, _copies(adapter, {WEIGHTS: adapter.weights.data}))


def read_state(adapter: Adapter) -> AdapterState:
    """Return a copy of the whole state."""
    flats = {WEIGHTS: adapter.weights.data}
    if adapter.moments is not None:
        flats |= dict(zip((EXP_AVG, EXP_AVG_SQ), adapter.moments, strict=True))
    if adapter.gradients is not None:
        flats[GRADIENTS] = adapter.gradients
    return AdapterState(adapter.lora, adapter.step, _copies(adapter, flats))


def _copies(adapter: Adapter, flats: Mapping[str, Tensor]) -> Arrays:
    tensors: dict[str, NDArray[np.float32]] = {}
    for group, flat in flats.items():
        # One contiguous copy per group; the arrays are views of it. Unlike PyTorch, numpy uses huge pages: 370 MB take
        # 0.03 s instead of 0.13 s, most of which the kernel spent on small pages.
        memory = np.frombuffer(aligned_memory(flat.numel() * flat.itemsize), np.float32)
        copied = torch.from_numpy(memory).copy_(flat.detach())
        tensors |= {f"{group}/{name}": view.numpy() for name, view in adapter.layout.views(copied).items()}
    return tensors


def write_state(adapter: Adapter, state: AdapterState, *, with_optimizer: bool) -> None:
    """Set the state of a new adapter. Raises CheckpointInvalid if the tensors do not match its layout."""
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
