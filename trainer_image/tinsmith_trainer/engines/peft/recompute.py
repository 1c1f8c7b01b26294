"""Activation checkpointing of whole layers, for sequences whose activations would not fit."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

from torch import nn
from torch.utils.checkpoint import checkpoint

from tinsmith_trainer.torch_model.lora import Route, routed


@contextmanager
def recomputed(layers: Sequence[nn.Module], route: Route) -> Iterator[None]:
    """Layers called inside keep only their input, and run again in backward under the same route.

    The route is handed to the recomputation because on an accelerator backward runs in another thread.
    """
    for layer in layers:
        layer.forward = functools.partial(
            checkpoint, layer.forward, use_reentrant=False, context_fn=lambda: (nullcontext(), routed(route))
        )
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward
