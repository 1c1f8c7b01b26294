"""Products in parts of one size: the same numbers, and bits that do not depend on what else is multiplied."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tinsmith_trainer.torch_model.products import add_product_by_parts, linear_product, product_by_parts
from torch import Tensor
from torch.nn import functional

WIDTHS = [(16, 24), (64, 64), (256, 640)]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@settings(deadline=None)
@given(st.sampled_from(WIDTHS), st.integers(1, 200), st.sampled_from([None, 1, 16, 64]), st.booleans())
def test_a_product_in_parts_is_the_product(
    widths: tuple[int, int], rows: int, part: int | None, has_bias: bool
) -> None:
    x, weight = normal(rows, widths[0]), normal(widths[1], widths[0], seed=1)
    bias = normal(widths[1], seed=2) if has_bias else None
    expected = functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    torch.testing.assert_close(product_by_parts(x, weight, bias, part).double(), expected, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(linear_product(x, weight, bias).double(), expected, rtol=1e-4, atol=1e-3)


@settings(deadline=None)
@given(st.sampled_from(WIDTHS), st.integers(1, 200), st.sampled_from([None, 1, 16, 64]), st.booleans())
def test_a_product_is_added_in_parts(widths: tuple[int, int], rows: int, part: int | None, is_low: bool) -> None:
    out = normal(rows, widths[1]).to(torch.bfloat16 if is_low else torch.float32)
    left, right = normal(rows, widths[0], seed=1) / 16, normal(widths[0], widths[1], seed=2)
    expected = out.double() + left.double() @ right.double()
    add_product_by_parts(out, left, right, part)
    rounding = 2e-2 if is_low else 1e-4
    torch.testing.assert_close(out.double(), expected, rtol=rounding, atol=rounding)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("part", [16, 64, 80])
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_a_rows_bits_depend_neither_on_its_place_nor_on_the_other_rows(widths: tuple[int, int], part: int) -> None:
    x, weight, right = normal(200, widths[0]), normal(widths[1], widths[0], seed=1), normal(widths[1], 32, seed=2)
    together = product_by_parts(x, weight, None, part)
    sums = normal(200, 32, seed=3)
    added = sums.clone()
    add_product_by_parts(added, together, right, part)
    for first, last in ((0, 1), (3, 19), (15, 17), (63, 90), (199, 200)):
        alone, own_sums = product_by_parts(x[first:last], weight, None, part), sums[first:last].clone()
        assert torch.equal(alone, together[first:last])
        add_product_by_parts(own_sums, alone, right, part)
        assert torch.equal(own_sums, added[first:last])
