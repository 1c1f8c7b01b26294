"""Matrix products with frozen weights. For each machine and shape, the faster library of PyTorch computes the product.

On CPUs the choice is between MKL and oneDNN. On processors that Intel did not make, MKL uses half the width of AVX-512.
On an AMD EPYC of family 26 and one thread, MKL reaches 90 GFLOP/s for 128 x 256 x 640, and oneDNN 190. A call of oneDNN
takes about 10 us longer than a call of MKL, which is too much for small products. With AVX2 only, MKL is faster for all
shapes: on an EPYC of family 25, 88 GFLOP/s against 77. The choice of the library depends only on the machine and the
shapes, and so do the bits of a product.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

WORTH_ONEDNN = 2_000_000
"""The number of multiplications above which oneDNN is faster.

Measured on one thread: oneDNN takes 0.8 times MKL's time for 16 x 256 x 640, and 1.2 times MKL's time for 16 x 256 x
256.
"""

THREADS_WITHOUT_TAILS = 2
"""The largest number of threads with shares that are always whole vectors, because half of a row is whole vectors."""
LEAST_PART_FLOATS = 32_768
"""The minimum number of elements that PyTorch gives to a thread: at::internal::GRAIN_SIZE."""

IS_NARROW = torch.backends.cpu.get_cpu_capability() == "AVX2"
HAS_ONEDNN = torch._C._has_mkldnn and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def linear_product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `x @ weight.T + bias` for x `[m, k]`, weight `[n, k]`.

    On the CPU, autograd records no gradient for this product.
    """
    if uses_onednn(x, weight, len(x)):
        product: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")
        return product
    return functional.linear(x, weight, bias)


def uses_onednn(x: Tensor, weight: Tensor, rows: int) -> bool:
    """Return whether oneDNN computes a product of this many rows of x."""
    is_float32 = x.dtype == weight.dtype == torch.float32
    is_large = rows * weight.numel() >= WORTH_ONEDNN
    return HAS_ONEDNN and not IS_NARROW and x.device.type == "cpu" and is_float32 and is_large


def product_by_parts(x: Tensor, weight: Tensor, bias: Tensor | None, part: int | None) -> Tensor:
    """Return `linear_product`, computed for `part` rows at a time. If `part` is None, compute all rows at once.

    The last part is padded, so that every product has the same shape for any number of rows. The position of a row in a
    part does not change the row's bits: all rows of a product are summed in the same order (a test checks this).
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
        torch.bmm(padded_rows(x[whole:], part).unsqueeze(0), weight.T.unsqueeze(0), out=out[whole:].unsqueeze(0))
    if bias is not None:
        out += bias
    return out[: len(x)]


def _onednn_by_parts(x: Tensor, weight: Tensor, bias: Tensor | None, part: int) -> Tensor:
    products = [linear_product(padded_rows(rows, part), weight, bias)[: len(rows)] for rows in torch.split(x, part)]
    return products[0] if len(products) == 1 else torch.cat(products)


def add_product_by_parts(out: Tensor, left: Tensor, right: Tensor, part: int | None) -> None:
    """Compute `out += left @ right` in parts, like `product_by_parts`.

    Adapters are float32 for any dtype of `out`, and the result is rounded once at the end.
    """
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
        sums = padded_rows(out[whole:], part).unsqueeze(0)
        sums.baddbmm_(padded_rows(left[whole:], part).unsqueeze(0), right.unsqueeze(0))
        out[whole:] = sums[0, : len(out) - whole]


def _in_parts(x: Tensor, part: int) -> Tensor:
    return x.view(-1, part, x.shape[-1])


def _for_each(right: Tensor, parts: int) -> Tensor:
    """Repeat one right matrix for each part. The library computes each product separately, with the same bits."""
    return right.expand(parts, *right.shape)


def padded_rows(x: Tensor, rows: int) -> Tensor:
    """Pad a matrix with zeros to this number of rows."""
    return x if len(x) >= rows else functional.pad(x, (0, 0, 0, rows - len(x)))
