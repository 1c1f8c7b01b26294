"""RMS norms as one kernel on a GPU.

The transformers library writes an RMS norm as eight operations, which read and write the hidden states in float32. On
an H100, these operations take a fifth of a training step's time by the cost model (`dev/benchmarks/gpu_model.py`).
PyTorch has one kernel for the forward and two for the backward. The kernels round only once, after the product with the
weight.
"""

from __future__ import annotations

import copy
import functools

import torch
from torch import Tensor, nn
from torch.nn import functional

TRIAL_ROWS = 4
TRIAL_TOLERANCE = 1e-5
"""The largest relative difference between a norm and PyTorch's function in float32 that still counts as rounding."""
EPSILONS = ("variance_epsilon", "eps", "epsilon")
"""The names of the term under the square root in the classes of transformers."""


def fuse_norms(model: nn.Module) -> int:
    """Let PyTorch's kernel compute each norm of the model that has the kernel's formula.

    Return the number of replaced norms.

    A trial decides for each norm, because classes with the same attributes differ: Gemma's norm adds 1 to the weight.
    """
    norms = [(module, epsilon) for module in model.modules() if (epsilon := _epsilon(module)) is not None]
    fused = [(norm, epsilon) for norm, epsilon in norms if _agrees(norm, epsilon)]
    for norm, epsilon in fused:
        norm.forward = functools.partial(rms_norm, norm, epsilon)
    return len(fused)


def rms_norm(norm: nn.Module, epsilon: float, x: Tensor) -> Tensor:
    """Return the norm of x `[..., d]`. Each call reads the weight from the module, which may move to another device."""
    weight = norm.weight
    assert isinstance(weight, Tensor)
    return functional.rms_norm(x, weight.shape, weight, epsilon)


def _epsilon(module: nn.Module) -> float | None:
    """Return the epsilon of a norm with one weight for each channel, or None for other modules."""
    parameters = dict(module.named_parameters())
    has_one_weight = parameters.keys() == {"weight"} and parameters["weight"].dim() == 1
    if not has_one_weight or not type(module).__name__.endswith("RMSNorm"):
        return None
    return next((float(found) for name in EPSILONS if isinstance(found := getattr(module, name, None), float)), None)


@torch.no_grad()
def _agrees(norm: nn.Module, epsilon: float) -> bool:
    """Return whether a copy of the norm agrees with PyTorch's function, in float32 on the CPU, for random weights."""
    copied = copy.deepcopy(norm).to("cpu", torch.float32)
    [weight] = copied.parameters()
    generator = torch.Generator().manual_seed(0)
    weight.normal_(generator=generator)
    x = torch.randn((TRIAL_ROWS, len(weight)), generator=generator)
    try:
        found = copied(x)
    except TypeError:  # a norm that takes a gate in addition to the hidden states
        return False
    expected = rms_norm(copied, epsilon, x)
    return isinstance(found, Tensor) and torch.allclose(found, expected, rtol=TRIAL_TOLERANCE, atol=TRIAL_TOLERANCE)
