"""Matrix products of frozen weights, by whichever library of PyTorch's is the faster one for the shape.

On CPUs that is MKL or oneDNN. MKL uses half the width of another maker's AVX-512: on an AMD EPYC of family 26 and one
thread it reaches 90 GFLOP/s for 128 x 256 x 640, and oneDNN 190. But a call of oneDNN's costs some 10 us more, which
small products never make good. Which one it is follows from the shapes alone, and so do the bits.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

WORTH_ONEDNN = 2_000_000
"""Multiplications. Measured as above: at 16 x 256 x 640 oneDNN takes 0.8 of MKL's time, at 16 x 256 x 256 1.2 of it."""

THREADS_WITHOUT_TAILS = 2
"""Halves of rows of whole vectors are whole vectors."""
LEAST_PART_FLOATS = 32_768
"""What PyTorch gives a thread at least: at::internal::GRAIN_SIZE."""

HAS_ONEDNN = torch._C._has_mkldnn and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def linear_product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias` for x `[m, k]`, weight `[n, k]`. On the CPU it records no gradient."""
    if uses_onednn(x, weight):
        product: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")
        return product
    return functional.linear(x, weight, bias)


def uses_onednn(x: Tensor, weight: Tensor) -> bool:
    is_float32 = x.dtype == weight.dtype == torch.float32
    is_large = x.shape[0] * weight.numel() >= WORTH_ONEDNN
    return HAS_ONEDNN and x.device.type == "cpu" and is_float32 and is_large


def product_by_parts(x: Tensor, weight: Tensor, bias: Tensor | None, part: int | None) -> Tensor:
    """`linear_product` of so many rows of x at a time. None: of all at once.

    What is left at the end is filled up, so that a row's product has one shape however many rows there are. Its place
    among them does not matter to its bits: all rows of a product are summed in the same order (a test holds that).
    """
    if part is None or part == len(x):
        return linear_product(x, weight, bias)
    products = [linear_product(filled_up(rows, part), weight, bias)[: len(rows)] for rows in torch.split(x, part)]
    return torch.cat(products)


def add_product_by_parts(out: Tensor, left: Tensor, right: Tensor, part: int | None) -> None:
    """`out += left @ right`, as above. Adapters are float32 whatever the dtype of `out` is, rounded once at the end."""
    if out.dtype != left.dtype:
        out += product_by_parts(left, right.T, None, part)
        return
    for sums, rows in zip(torch.split(out, part or len(out)), torch.split(left, part or len(out)), strict=True):
        if part is None or len(rows) == part:
            sums.addmm_(rows, right)
        else:
            sums.copy_(filled_up(sums, part).addmm_(filled_up(rows, part), right)[: len(rows)])


def filled_up(x: Tensor, rows: int) -> Tensor:
    """With zeros, up to so many rows."""
    return x if len(x) >= rows else functional.pad(x, (0, 0, 0, rows - len(x)))
