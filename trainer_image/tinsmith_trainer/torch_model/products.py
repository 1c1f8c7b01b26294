"""Matrix products of frozen weights, by whichever library of PyTorch's is the faster one for machine and shape.

On CPUs that is MKL or oneDNN. MKL uses half the width of another maker's AVX-512: on an AMD EPYC of family 26 and one
thread it reaches 90 GFLOP/s for 128 x 256 x 640, and oneDNN 190. But a call of oneDNN's costs some 10 us more, which
small products never make good. Where AVX2 is all there is MKL is the faster one for all shapes: on an EPYC of family 25
it is 88 GFLOP/s against 77. Which one it is follows from machine and shapes alone, and so do the bits.
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

IS_NARROW = torch.backends.cpu.get_cpu_capability() == "AVX2"
HAS_ONEDNN = torch._C._has_mkldnn and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def linear_product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias` for x `[m, k]`, weight `[n, k]`. On the CPU it records no gradient."""
    if uses_onednn(x, weight, len(x)):
        product: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")
        return product
    return functional.linear(x, weight, bias)


def uses_onednn(x: Tensor, weight: Tensor, rows: int) -> bool:
    """For a product of so many rows of x."""
    is_float32 = x.dtype == weight.dtype == torch.float32
    is_large = rows * weight.numel() >= WORTH_ONEDNN
    return HAS_ONEDNN and not IS_NARROW and x.device.type == "cpu" and is_float32 and is_large


def product_by_parts(x: Tensor, weight: Tensor, bias: Tensor | None, part: int | None) -> Tensor:
    """`linear_product` of so many rows of x at a time. None: of all at once.

    What is left at the end is filled up, so that a row's product has one shape however many rows there are. Its place
    among them does not matter to its bits: all rows of a product are summed in the same order (a test holds that).
    """
    if part is None:
        return linear_product(x, weight, bias)
    if uses_onednn(x, weight, part):
        return _onednn_by_parts(x, weight, bias, part)
    whole = len(x) - len(x) % part
    out = x.new_empty((-(-len(x) // part) * part, len(weight)))
    if whole:
        torch.bmm(_in_parts(x[:whole], part), _for_each(weight.T, whole // part), out=_in_parts(out[:whole], part))
    if whole < len(x):
        torch.bmm(filled_up(x[whole:], part).unsqueeze(0), weight.T.unsqueeze(0), out=out[whole:].unsqueeze(0))
    if bias is not None:
        out += bias
    return out[: len(x)]


def _onednn_by_parts(x: Tensor, weight: Tensor, bias: Tensor | None, part: int) -> Tensor:
    products = [linear_product(filled_up(rows, part), weight, bias)[: len(rows)] for rows in torch.split(x, part)]
    return products[0] if len(products) == 1 else torch.cat(products)


def add_product_by_parts(out: Tensor, left: Tensor, right: Tensor, part: int | None) -> None:
    """`out += left @ right`, as above. Adapters are float32 whatever the dtype of `out` is, rounded once at the end."""
    if out.dtype != left.dtype:
        out += product_by_parts(left, right.T, None, part)
        return
    if part is None:
        out.addmm_(left, right)
        return
    whole = len(out) - len(out) % part
    if whole:
        _in_parts(out[:whole], part).baddbmm_(_in_parts(left[:whole], part), _for_each(right, whole // part))
    if whole < len(out):
        sums = filled_up(out[whole:], part).unsqueeze(0)
        sums.baddbmm_(filled_up(left[whole:], part).unsqueeze(0), right.unsqueeze(0))
        out[whole:] = sums[0, : len(out) - whole]


def _in_parts(x: Tensor, part: int) -> Tensor:
    return x.view(-1, part, x.shape[-1])


def _for_each(right: Tensor, parts: int) -> Tensor:
    """One product's right side for so many: the library takes each by itself, whose bits are those of it alone."""
    return right.expand(parts, *right.shape)


def filled_up(x: Tensor, rows: int) -> Tensor:
    """With zeros, up to so many rows."""
    return x if len(x) >= rows else functional.pad(x, (0, 0, 0, rows - len(x)))
