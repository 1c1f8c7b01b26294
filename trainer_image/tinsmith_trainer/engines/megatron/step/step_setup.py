"""Megatron's data parallelism and optimizer around a model, set so that gradients are sums and nothing runs ahead."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from tinsmith_trainer.engines.megatron.step.optimizer_state import chained


def wrap_for_training(chunk: Any, *, distributed_optimizer: bool = False) -> tuple[Any, Any]:
    """Megatron's DistributedDataParallel and optimizer of what a model's part has to train, fit for `AdapterStep`.

    `chunk.config` must ask for sums: `calculate_per_token_loss`. Inside `cpu_megatron()`.
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
        # Every step brings its own; see AdamParams.
        lr=0.0,
        clip_grad=0.0,
        bf16=any(parameter.dtype == torch.bfloat16 for parameter in chunk.parameters() if parameter.requires_grad),
        use_distributed_optimizer=distributed_optimizer,
    )
    return ddp, get_megatron_optimizer(adam, [ddp])


def check_setup(ddp: Any, optimizer: Any, parameters: Sequence[Tensor]) -> None:
    """Raises ValueError with all that would make a step of ours wrong."""
    if wrong := [*_wrong_with_parameters(ddp, parameters), *_wrong_with_reduction(ddp), *_wrong_with_adam(optimizer)]:
        raise ValueError(f"Adapters cannot be trained on this model: {'; '.join(wrong)}.")


def _wrong_with_parameters(ddp: Any, parameters: Sequence[Tensor]) -> Iterator[str]:
    trained = {id(parameter) for parameter in ddp.parameters() if parameter.requires_grad}
    if not parameters:
        yield "this rank's part of it has no matrices to train"
    elif trained != {id(parameter) for parameter in parameters}:
        yield "what it trains is not what the adapters consist of"
    if len({parameter.dtype for parameter in parameters}) > 1:
        yield "its adapter has parameters of several types"


def _wrong_with_reduction(ddp: Any) -> Iterator[str]:
    config, data_parallel = ddp.config, ddp.ddp_config
    if not config.calculate_per_token_loss or data_parallel.average_in_collective:
        yield "its gradients would be means (set calculate_per_token_loss, and average_in_collective off)"
    if data_parallel.overlap_grad_reduce or data_parallel.overlap_param_gather:
        yield "it communicates ahead of a call's end (set overlap_grad_reduce and overlap_param_gather off)"
    if data_parallel.check_for_nan_in_grad:
        yield "it ends a rank where a gradient is not a number (set check_for_nan_in_grad off)"
    if not data_parallel.grad_reduce_in_fp32:
        yield "its gradients are not summed in float32 (set grad_reduce_in_fp32)"
    if data_parallel.num_distributed_optimizer_instances != 1:
        yield "it has several instances of the distributed optimizer"
    if config.hidden_dropout or config.attention_dropout:
        yield "it drops activations by chance (set hidden_dropout and attention_dropout to 0)"


def _wrong_with_adam(optimizer: Any) -> Iterator[str]:
    for config in (one.config for one in chained(optimizer)):
        if config.optimizer != "adam" or not config.decoupled_weight_decay:
            yield "its optimizer is not AdamW (set optimizer: adam, and decoupled_weight_decay)"
        if config.fp16:
            yield "it scales losses, as float16 needs (use bf16)"
        if config.use_precision_aware_optimizer or config.optimizer_cpu_offload:
            yield "its optimizer keeps state where it cannot be read (no precision-aware optimizer, no CPU offload)"
