"""Megatron's core without a GPU: no random states of one, and no kernels for one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

KERNELS = (
    "apply_rope_fusion",
    "bias_dropout_fusion",
    "gradient_accumulation_fusion",
    "masked_softmax_fusion",
    "moe_permute_fusion",
    "persist_layer_norm",
)
"""Fields of `TransformerConfig` that ask for kernels of TransformerEngine's, Apex' or Megatron's own."""


def draw_without_gpu() -> None:
    """Draw from the CPU's generator, which checkpointed layers restore.

    No number that matters is drawn: there is no dropout, and weights come from files.
    """
    from megatron.core.tensor_parallel import random

    @contextmanager
    def fork(*_: Any, **__: Any) -> Iterator[None]:
        yield

    def nothing(*_: Any, **__: Any) -> None: ...

    random.CudaRNGStatesTracker.fork = fork
    random.CudaRNGStatesTracker.add = nothing
    vars(random).update(
        model_parallel_cuda_manual_seed=nothing, _get_cuda_rng_state=nothing, _set_cuda_rng_state=nothing
    )


def use_no_kernels() -> None:
    """Our worker's config asks for one of rotary positions, and checkpoints remember what they were made with."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    finish = TransformerConfig.__post_init__

    def without_kernels(config: Any) -> None:
        for name in KERNELS:
            setattr(config, name, False)
        finish(config)

    TransformerConfig.__post_init__ = without_kernels


def norm_parts_of_sequences() -> None:
    """PyTorch's norms are refused under sequence parallelism: ranks would have to sum the gradient of a norm's weight.

    A frozen one has none, and each token is normed for itself.
    """
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    make = WrappedTorchNorm.__new__

    def make_for_parts(cls: Any, config: Any, *args: Any, **named: Any) -> Any:
        parallel, config.sequence_parallel = config.sequence_parallel, False
        try:
            return make(cls, config, *args, **named)
        finally:
            config.sequence_parallel = parallel

    WrappedTorchNorm.__new__ = make_for_parts


def send_tokens_without_gpu() -> None:
    """Send tokens without a GPU.

    Counts of tokens are on the CPU already, and a router needs no product of TransformerEngine's.
    """
    from megatron.core.transformer.moe import moe_utils, token_dispatcher
    from torch import Tensor

    def as_counts(tensor: Any, as_numpy: bool = False, **_: Any) -> Any:
        return tensor.numpy() if as_numpy and isinstance(tensor, Tensor) else tensor

    token_dispatcher.maybe_move_tensor_to_cpu = as_counts
    vars(moe_utils).setdefault("te_general_gemm", None)
