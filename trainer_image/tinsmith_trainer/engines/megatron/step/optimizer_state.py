"""What Megatron's optimizers hold of each parameter: float32 masters and Adam's moments, read and set.

Three optimizers are known: on float32 parameters; on 16-bit parameters with float32 masters; and the distributed one,
in which every data-parallel rank holds a range of each flattened parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from tinsmith_trainer.engines.base import AdamParams
from tinsmith_trainer.engines.megatron.step.adapter_slots import pack, split

MOMENTS = ("exp_avg", "exp_avg_sq")

Moments = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Master:
    """What this rank's optimizer steps of `parameter`: the elements `start` to `end` of it, flattened.

    `tensor` holds them in float32, and is the key to `inner.state`.
    """

    parameter: Tensor
    tensor: Tensor
    start: int
    end: int
    inner: torch.optim.Optimizer


class OptimizerState:
    """Masters and moments of `parameters`, flat, in their order; a rank's shards of them where they are sharded."""

    def __init__(self, optimizer: Any, parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters
        self._optimizers = [one for one in chained(optimizer) if not one.is_stub_optimizer]
        by_parameter = {id(master.parameter): master for one in self._optimizers for master in _masters(one)}
        held = (by_parameter.get(id(parameter)) for parameter in parameters)
        self._masters = [master for master in held if master is not None]
        self._groups = _data_groups(self._optimizers)

    def masters(self) -> list[Tensor]:
        """The live tensors."""
        return [master.tensor for master in self._masters]

    def moments(self) -> Moments:
        """Copies. Only after a step: before it, Adam has none."""
        first, second = (
            pack([master.inner.state[master.tensor][name] for master in self._masters]) for name in MOMENTS
        )
        return first, second

    def set_moments(self, step: int, moments: Moments | None) -> None:
        """None removes the entries: Adam makes new ones at its next step, and zeros would not be the same to it."""
        for inner in self._inners():
            inner.state.clear()
            _set_group_step(inner, step if moments else None)
        if moments is None:
            return
        tensors = self.masters()
        shaped = (split(flat.to(self._device, copy=True), tensors) for flat in moments)
        for master, first, second in zip(self._masters, *shaped, strict=True):
            entry: dict[str, Any] = dict(zip(MOMENTS, (first, second), strict=True))
            if _keeps_step_by_tensor(master.inner):
                entry["step"] = torch.tensor(float(step))
            master.inner.state[master.tensor] = entry

    def set_hyperparameters(self, params: AdamParams) -> None:
        """LoRA has matrices alone, which all decay: groups differ in nothing."""
        for inner in self._inners():
            for group in inner.param_groups:
                group["lr"] = params.learning_rate
                group["betas"] = (params.beta1, params.beta2)
                group["eps"] = params.eps
                group["weight_decay"] = params.weight_decay

    def clip(self, norm: float, largest: float) -> None:
        """Scales the ready gradients as torch's clipping does; `largest` 0 is off."""
        scale = largest / (norm + 1e-6) if largest > 0 else 1.0
        gradients = [gradient for master in self._masters if (gradient := master.tensor.grad) is not None]
        if scale < 1.0 and gradients:
            torch._foreach_mul_(gradients, scale)

    def forget_gradients(self) -> None:
        """The ready gradients are views of buffers, in which the next backward would find them a second time."""
        for master in self._masters:
            master.tensor.grad = None
        for parameter in self._parameters:
            parameter.grad = None

    def shards(self, whole: Tensor) -> Tensor:
        """Of values of all parameters, flat, those that this rank's optimizer holds, flat."""
        by_parameter = {
            id(parameter): part.reshape(-1)
            for parameter, part in zip(self._parameters, split(whole, self._parameters), strict=True)
        }
        return pack([by_parameter[id(master.parameter)][master.start : master.end] for master in self._masters])

    def whole(self, shards: Tensor) -> Tensor:
        """The inverse of `shards`, on the host; with the distributed optimizer a call of all data-parallel ranks."""
        flat = torch.zeros(sum(parameter.numel() for parameter in self._parameters), device=self._device)
        parts = dict(zip(map(id, self._parameters), split(flat, self._parameters), strict=True))
        held = split(shards.to(self._device), self.masters())
        for master, values in zip(self._masters, held, strict=True):
            parts[id(master.parameter)].view(-1)[master.start : master.end] = values.reshape(-1)
        for group, members in self._groups:
            _fill_gaps([parts[id(parameter)] for parameter in members if id(parameter) in parts], group)
        return flat.cpu()

    @property
    def _device(self) -> torch.device:
        return self._parameters[0].device

    def _inners(self) -> list[torch.optim.Optimizer]:
        return [one.optimizer for one in self._optimizers]


def chained(optimizer: Any) -> Sequence[Any]:
    """Megatron has an optimizer for dense parameters and one for those of experts."""
    optimizers: Sequence[Any] = getattr(optimizer, "chained_optimizers", [optimizer])
    return optimizers


def _masters(optimizer: Any) -> Iterator[Master]:
    # Imported already, by who made the optimizer.
    from megatron.core.optimizer import DistributedOptimizer, Float16OptimizerWithFloat16Params

    if isinstance(optimizer, DistributedOptimizer):
        yield from _sharded_masters(optimizer)
    elif isinstance(optimizer, Float16OptimizerWithFloat16Params):
        yield from _whole_masters(optimizer, optimizer.float16_groups, optimizer.fp32_from_float16_groups)
        yield from _whole_masters(optimizer, optimizer.fp32_from_fp32_groups, optimizer.fp32_from_fp32_groups)
    else:
        groups = [group["params"] for group in optimizer.param_groups]
        yield from _whole_masters(optimizer, groups, groups)


def _whole_masters(optimizer: Any, groups: Any, master_groups: Any) -> Iterator[Master]:
    for parameters, masters in zip(groups, master_groups, strict=True):
        for parameter, master in zip(parameters, masters, strict=True):
            yield Master(parameter, master, 0, parameter.numel(), optimizer.optimizer)


def _sharded_masters(optimizer: Any) -> Iterator[Master]:
    for groups, master_groups in (
        (optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups),
        (optimizer.model_fp32_groups, optimizer.shard_fp32_groups),
    ):
        for parameters, masters in zip(groups, master_groups, strict=True):
            for parameter, master in zip(parameters, masters, strict=True):
                held = optimizer._get_model_param_range_map(parameter)["param"]
                yield Master(parameter, master, held.start, held.end, optimizer.optimizer)


def _data_groups(optimizers: Sequence[Any]) -> list[tuple[Any, list[Tensor]]]:
    """Over which ranks a parameter's shards are spread, for each distributed optimizer."""
    from megatron.core.optimizer import DistributedOptimizer

    return [
        (optimizer.data_parallel_group, [parameter for buffer in optimizer.buffers for parameter in buffer.params])
        for optimizer in optimizers
        if isinstance(optimizer, DistributedOptimizer)
    ]


def _fill_gaps(parts: Sequence[Tensor], group: Any) -> None:
    """Every element is on one rank, and zero on the others. Summed as integers, so that the bits stay what they are."""
    bits = pack(parts).view(torch.int32)
    torch.distributed.all_reduce(bits, group=group)
    for part, filled in zip(parts, split(bits.view(torch.float32), parts), strict=True):
        part.copy_(filled)


def _keeps_step_by_tensor(inner: torch.optim.Optimizer) -> bool:
    """torch's AdamW does. TransformerEngine's and Apex's keep one number in each parameter group."""
    return isinstance(inner, torch.optim.Adam | torch.optim.AdamW)


def _set_group_step(inner: torch.optim.Optimizer, step: int | None) -> None:
    if _keeps_step_by_tensor(inner):
        return
    for group in inner.param_groups:
        group.pop("step", None)
        if step is not None:
            group["step"] = step
