"""The trial of `numerics: exact` on a GPU: the same call twice must give the same bits.

PyTorch's deterministic algorithms cover its own operations. The kernels of other packages, and attention over many
keys, may still add in any order. So an engine starts only if a datum that is long enough for several blocks of
attention repeats to the last bit.
"""

from __future__ import annotations

import os

import numpy as np
import torch

from tinsmith_trainer.engines.base import AdamParams, Datum, Engine, LoraSpec, LossSpec, Work
from tinsmith_trainer.errors import ServerError

CUBLAS_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
CUBLAS_WORKSPACE = ":4096:8"
"""Eight buffers of 4 MiB: with a fixed workspace cuBLAS chooses the same kernels on each stream."""
TRIAL_TOKENS = 1024
TRIAL_ADAPTER = "trial"
TRIAL_RANK = 4


def use_deterministic_algorithms() -> None:
    """Let PyTorch compute deterministically, if it can. Call this before the first product on the GPU.

    An operation without a deterministic kernel only warns, because the sampler of this process uses such operations,
    for example `cumsum`. `check_repeats` decides about training.
    """
    os.environ[CUBLAS_VARIABLE] = CUBLAS_WORKSPACE
    torch.use_deterministic_algorithms(True, warn_only=True)
    # It would fill all new memory, which only finds errors.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def check_repeats(engine: Engine) -> None:
    """Train an adapter twice from the same start. Raises ServerError if the weights differ."""
    first, second = _trained(engine), _trained(engine)
    differing = [name for name, values in first.items() if not np.array_equal(values, second[name])]
    if differing:
        raise ServerError(
            f"--numerics exact: on this device repeated steps give other bits in {len(differing)} of {len(first)} "
            f"tensors, for example {differing[0]}. Use --numerics fast, whose replays differ by rounding."
        )


def _trained(engine: Engine) -> dict[str, np.ndarray]:
    base, can = engine.base_model(), engine.capabilities()
    length = min(TRIAL_TOKENS, base.max_sequence_length)
    tokens = np.random.default_rng(0).integers(0, base.vocab_size, length + 1)
    datum = Datum(tokens[:-1].astype(np.int32), {"target_tokens": tokens[1:]})
    rank = min(TRIAL_RANK, can.max_rank)
    engine.create_adapter(TRIAL_ADAPTER, LoraSpec(rank, 32.0, 1, can.train_attn, can.train_mlp, can.train_unembed))
    try:
        for _ in range(2):  # in the first step B is zero, which hides the gradient of A
            call = engine.start(Work(TRIAL_ADAPTER, [datum], LossSpec("cross_entropy")))
            while call.next_tokens:
                engine.advance([call])
            engine.finish(call)
            engine.optim_step(TRIAL_ADAPTER, AdamParams(learning_rate=1e-3))
        return dict(engine.weights(TRIAL_ADAPTER).tensors)
    finally:
        engine.drop(TRIAL_ADAPTER)
