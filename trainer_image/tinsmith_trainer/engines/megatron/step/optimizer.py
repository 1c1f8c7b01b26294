"""Megatron's data parallelism and optimizers: the setup, and access to the state of an optimizer.

With this setup, gradients are sums, and communication does not overlap with computation. An optimizer holds a float32
master and Adam's moments for each parameter. Three optimizers are supported: for float32 parameters; for 16-bit
parameters with float32 masters; and the distributed optimizer, in which every data-parallel rank holds a range of each
flattened parameter.
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
    """The elements of a flattened `parameter`, from `start` to `end`, that this rank's optimizer changes.

    `tensor` holds the elements in float32, and is the key to `inner.state`.
    """

    parameter: Tensor
    tensor: Tensor
    start: int
    end: int
    inner: torch.optim.Optimizer


class OptimizerState:
    """Masters and moments of `parameters`, flat and in order.

    With the distributed optimizer, masters and moments are this rank's shards.
    """

    def __init__(self, optimizer: Any, parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters
        self._optimizers = [each for each in chained(optimizer) if not each.is_stub_optimizer]
        by_parameter = {id(master.parameter): master for each in self._optimizers for master in _masters(each)}
        held = (by_parameter.get(id(parameter)) for parameter in parameters)
        self._masters = [master for master in held if master is not None]
        self._groups = _data_groups(self._optimizers)

    def masters(self) -> list[Tensor]:
        """Return the master tensors themselves, not copies."""
        return [master.tensor for master in self._masters]

    def moments(self) -> Moments:
        """Return copies of Adam's moments, which exist only after a step."""
        first, second = (
            pack([master.inner.state[master.tensor][name] for master in self._masters]) for name in MOMENTS
        )
        return first, second

    def set_moments(self, step: int, moments: Moments | None) -> None:
        """Set the moments.

        If `moments` is None, the moments are removed. Adam creates missing moments in the next step.

        Zero moments would give another result.
        """
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
        """Set the hyperparameters in all groups.

        All matrices of LoRA have weight decay, so all parameter groups are equal.
        """
        for inner in self._inners():
            for group in inner.param_groups:
                group["lr"] = params.learning_rate
                group["betas"] = (params.beta1, params.beta2)
                group["eps"] = params.eps
                group["weight_decay"] = params.weight_decay

    def clip(self, norm: float, largest: float) -> None:
        """Scale the complete gradients in the same way as torch's clipping.

        If `largest` is 0, gradients are not scaled.
        """
        scale = largest / (norm + 1e-6) if largest > 0 else 1.0
        gradients = [gradient for master in self._masters if (gradient := master.tensor.grad) is not None]
        if scale < 1.0 and gradients:
            torch._foreach_mul_(gradients, scale)

    def forget_gradients(self) -> None:
        """Drop the complete gradients.

        Complete gradients are views of buffers, to which the next backward would add.
        """
        for master in self._masters:
            master.tensor.grad = None
        for parameter in self._parameters:
            parameter.grad = None

    def shards(self, whole: Tensor) -> Tensor:
        """Cut this rank's shards out of flat values of all parameters, and return one flat tensor."""
        by_parameter = {
            id(parameter): part.reshape(-1)
            for parameter, part in zip(self._parameters, split(whole, self._parameters), strict=True)
        }
        return pack([by_parameter[id(master.parameter)][master.start : master.end] for master in self._masters])

    def whole(self, shards: Tensor) -> Tensor:
        """Return the values of all parameters from the ranks' shards, on the host: the inverse of `shards`.

        With the distributed optimizer all data-parallel ranks must make this call.
        """
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
        return [each.optimizer for each in self._optimizers]


def chained(optimizer: Any) -> Sequence[Any]:
    """Return Megatron's optimizers: one for dense parameters, and one for the parameters of experts."""
    optimizers: Sequence[Any] = getattr(optimizer, "chained_optimizers", [optimizer])
    return optimizers


def _masters(optimizer: Any) -> Iterator[Master]:
    # Already imported by the creator of the optimizer.
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
    """Return the ranks that hold the shards of a parameter, for each distributed optimizer."""
    from megatron.core.optimizer import DistributedOptimizer

    return [
        (optimizer.data_parallel_group, [parameter for buffer in optimizer.buffers for parameter in buffer.params])
        for optimizer in optimizers
        if isinstance(optimizer, DistributedOptimizer)
    ]


def _fill_gaps(parts: Sequence[Tensor], group: Any) -> None:
    """Combine the ranks' parts. Each element has a value on one rank, and is zero on all other ranks.

    The parts are summed as integers, so that the bits stay the same.
    """
    bits = pack(parts).view(torch.int32)
    torch.distributed.all_reduce(bits, group=group)
    for part, filled in zip(parts, split(bits.view(torch.float32), parts), strict=True):
        part.copy_(filled)


def _keeps_step_by_tensor(inner: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer keeps the step number per tensor, like torch's optimizers.

    TransformerEngine and Apex keep the step number per parameter group.
    """
    return isinstance(inner, torch.optim.Adam | torch.optim.AdamW)


def _set_group_step(inner: torch.optim.Optimizer, step: int | None) -> None:
    if _keeps_step_by_tensor(inner):
        return
    for group in inner.param_groups:
        group.pop("step", None)
        if step is not None:
            group["step"] = step


def wrap_for_training(chunk: Any, *, distributed_optimizer: bool = False) -> tuple[Any, Any]:
    """Return Megatron's DistributedDataParallel and optimizer for the trainable parameters, for `AdapterStep`.

    `chunk.config` must request sums, by `calculate_per_token_loss`. Call this inside `cpu_megatron()`.
    """
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    data_parallel = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=False,
        overlap_param_gather=False,
        average_in_collective=False,
        check_for_nan_in_grad=False,
        use_distributed_optimizer=distributed_optimizer,
    )
    ddp = DistributedDataParallel(chunk.config, data_parallel, chunk)
    adam = OptimizerConfig(
        optimizer="adam",
        # Every step sets its own; see AdamParams.
        lr=0.0,
        clip_grad=0.0,
        bf16=any(parameter.dtype == torch.bfloat16 for parameter in chunk.parameters() if parameter.requires_grad),
        use_distributed_optimizer=distributed_optimizer,
    )
    return ddp, get_megatron_optimizer(adam, [ddp])


def check_setup(ddp: Any, optimizer: Any, parameters: Sequence[Tensor]) -> None:
    """Raise ValueError with a list of all settings that would make a step wrong."""
    if wrong := [*_wrong_with_parameters(ddp, parameters), *_wrong_with_reduction(ddp), *_wrong_with_adam(optimizer)]:
        raise ValueError(f"Adapters cannot be trained on this model: {'; '.join(wrong)}.")


def _wrong_with_parameters(ddp: Any, parameters: Sequence[Tensor]) -> Iterator[str]:
    trained = {id(parameter) for parameter in ddp.parameters() if parameter.requires_grad}
    if not parameters:
        yield "this rank's part has no matrices to train"
    elif trained != {id(parameter) for parameter in parameters}:
        yield "its trainable parameters are not those of the adapters"
    if len({parameter.dtype for parameter in parameters}) > 1:
        yield "its adapter has parameters of several types"


def _wrong_with_reduction(ddp: Any) -> Iterator[str]:
    config, data_parallel = ddp.config, ddp.ddp_config
    if not config.calculate_per_token_loss or data_parallel.average_in_collective:
        yield "its gradients would be means (set calculate_per_token_loss, and average_in_collective off)"
    if data_parallel.overlap_grad_reduce or data_parallel.overlap_param_gather:
        yield "it communicates before a call's end (set overlap_grad_reduce and overlap_param_gather off)"
    if data_parallel.check_for_nan_in_grad:
        yield "it ends a rank when a gradient is NaN (set check_for_nan_in_grad off)"
    if not data_parallel.grad_reduce_in_fp32:
        yield "its gradients are not summed in float32 (set grad_reduce_in_fp32)"
    if data_parallel.num_distributed_optimizer_instances != 1:
        yield "it has several instances of the distributed optimizer"
    if config.hidden_dropout or config.attention_dropout:
        yield "it has dropout (set hidden_dropout and attention_dropout to 0)"


def _wrong_with_adam(optimizer: Any) -> Iterator[str]:
    for config in (each.config for each in chained(optimizer)):
        if config.optimizer != "adam" or not config.decoupled_weight_decay:
            yield "its optimizer is not AdamW (set optimizer: adam, and decoupled_weight_decay)"
        if config.fp16:
            yield "it scales losses for float16 (use bf16)"
        if config.use_precision_aware_optimizer or config.optimizer_cpu_offload:
            yield "its optimizer state cannot be read (disable the precision-aware optimizer and CPU offload)"
