"""The LoRA layer's own gradients against autograd's, and a group's bits against its company's."""

from __future__ import annotations

import threading

import pytest
import torch
from tinsmith_trainer.torch_model import products
from tinsmith_trainer.torch_model.lora import (
    DeltasApart,
    OwnDelta,
    StackedDelta,
    StackedLoraLinear,
    module_family,
    routed,
)
from torch import Tensor, nn

ROWS, LENGTH = 4, 16
PRODUCT_TOKENS = 48  # three rows, which no number of rows here is a multiple of


def layer(
    d_in: int = 16, d_out: int = 24, *, bias: bool = False, dtype: torch.dtype = torch.float32
) -> StackedLoraLinear:
    generator = torch.Generator().manual_seed(0)
    linear = nn.Linear(d_in, d_out, bias=bias, dtype=dtype).requires_grad_(False)
    for parameter in linear.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return StackedLoraLinear(linear, "layer")


def delta(layer: StackedLoraLinear, groups: int, *, rank: int = 4, seed: int = 1) -> StackedDelta:
    generator = torch.Generator().manual_seed(seed)
    return StackedDelta(
        torch.randn(groups, rank, layer.in_features, generator=generator).requires_grad_(),
        torch.randn(groups, layer.out_features, rank, generator=generator).requires_grad_(),
        torch.linspace(0.5, 2.0, groups).view(-1, 1, 1),
    )


def apart(stack: StackedDelta) -> DeltasApart:
    """Return the same adapters one by one, some rows at a time."""
    scales = stack.scale.flatten().tolist()
    owns = tuple(map(OwnDelta, stack.lora_A, stack.lora_B, scales))
    return DeltasApart(owns, (ROWS * LENGTH,) * len(owns), PRODUCT_TOKENS)


def rows(layer: StackedLoraLinear, groups: int, *, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(groups * ROWS, LENGTH, layer.in_features, generator=generator)
    return x.to(dtype).requires_grad_()


def by_definition(layer: StackedLoraLinear, x: Tensor, delta: StackedDelta) -> Tensor:
    """`x W^T + b + scale (x A^T) B^T`, group by group, in autograd's own operations."""
    parts = []
    for group, part in enumerate(x.chunk(len(delta.lora_A))):
        low = part.float() @ delta.lora_A[group].T @ delta.lora_B[group].T * delta.scale[group]
        parts.append(layer.base(part) + low.to(part.dtype))
    return torch.cat(parts)


def gradients(out: Tensor, x: Tensor, delta: StackedDelta) -> tuple[Tensor, ...]:
    slope = torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).to(out.dtype)
    return torch.autograd.grad(out, (x, delta.lora_A, delta.lora_B), slope)


@pytest.mark.parametrize("is_apart", [True, False], ids=["apart", "stacked"])
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("bias", [False, True], ids=["no-bias", "bias"])
def test_output_and_gradients_are_those_of_the_definition(is_apart: bool, groups: int, bias: bool) -> None:
    one = layer(bias=bias)
    x, stack = rows(one, groups), delta(one, groups)

    with routed({"layer": apart(stack)} if is_apart else {"layer": stack}):
        out = one(x)

    expected = by_definition(one, x, stack)
    torch.testing.assert_close(out, expected)
    for mine, autograds in zip(gradients(out, x, stack), gradients(expected, x, stack), strict=True):
        torch.testing.assert_close(mine, autograds, rtol=1e-5, atol=1e-4)


def test_a_low_precision_base_gets_its_delta_in_float32_rounded_once() -> None:
    one = layer(dtype=torch.float16)
    x, stack = rows(one, 2, dtype=torch.float16), delta(one, 2)

    with routed({"layer": apart(stack)}):
        out = one(x)

    assert out.dtype == torch.float16
    torch.testing.assert_close(out, by_definition(one, x, stack), rtol=2e-3, atol=2e-2)
    grad_x, grad_A, grad_B = gradients(out, x, stack)
    assert (grad_x.dtype, grad_A.dtype, grad_B.dtype) == (torch.float16, torch.float32, torch.float32)


@pytest.mark.parametrize("position", range(4))
def test_a_row_has_the_bits_it_has_alone_with_any_other_rows_ranks_and_modules(position: int) -> None:
    one = layer(64, 96)
    x = rows(one, 4)[:10]
    owns = [None if rank is None else apart(delta(one, 1, rank=rank, seed=rank)).groups[0] for rank in (8, 2, None, 5)]
    counts = [1, 4, 2, 3]
    own, first = owns[position], sum(counts[:position])

    with routed({"layer": DeltasApart(tuple(owns), tuple(count * LENGTH for count in counts), PRODUCT_TOKENS)}):
        together = one(x)[first : first + 1]
    with routed({"layer": DeltasApart((own,), (LENGTH,), PRODUCT_TOKENS)}):
        by_itself = one(x[first : first + 1])

    assert torch.equal(together, by_itself)
    slope = torch.ones_like(by_itself)
    assert torch.equal(*(torch.autograd.grad(out, x, slope)[0] for out in (together, by_itself)))


@pytest.mark.skipif(not products.HAS_ONEDNN, reason="this PyTorch has no oneDNN")
def test_a_rows_bits_do_not_depend_on_its_groups_length_where_products_are_onednns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(products, "IS_NARROW", False)
    monkeypatch.setattr(products, "WORTH_ONEDNN", 1)
    one = layer(256, 640)
    x, stack = rows(one, 1), delta(one, 1, rank=8)
    own = OwnDelta(stack.lora_A[0], stack.lora_B[0], 0.5)
    slope = torch.randn(ROWS, LENGTH, 640, generator=torch.Generator().manual_seed(3))

    def output_and_gradient(first: int) -> tuple[Tensor, Tensor]:
        """Return output and gradient of the last row, preceded by the rows from `first` on."""
        with routed({"layer": DeltasApart((own,), ((ROWS - first) * LENGTH,), PRODUCT_TOKENS)}):
            part = x[first:].detach().requires_grad_()
            out = one(part)
        return out[-1], torch.autograd.grad(out, part, slope[first:])[0][-1]

    for alone, together in zip(output_and_gradient(ROWS - 1), output_and_gradient(0), strict=True):
        assert torch.equal(alone, together)


def test_an_adapters_gradients_have_the_bits_they_have_without_the_others() -> None:
    one = layer(64, 96)
    x, stack = rows(one, 3), delta(one, 3, rank=8)
    own = OwnDelta(stack.lora_A[1], stack.lora_B[1], 1.25)

    with routed({"layer": apart(stack)}):
        together = one(x).chunk(3)[1]
    with routed({"layer": DeltasApart((own,), (ROWS * LENGTH,), PRODUCT_TOKENS)}):
        by_itself = one(x.chunk(3)[1])

    slope = torch.ones_like(by_itself)
    assert torch.equal(together, by_itself)
    for mine, others in zip(
        torch.autograd.grad(together, (stack.lora_A, stack.lora_B), slope),
        torch.autograd.grad(by_itself, (stack.lora_A, stack.lora_B), slope),
        strict=True,
    ):
        assert torch.equal(mine, others)


@pytest.mark.parametrize("d_in", [16, 18], ids=["rows are aligned", "rows are not aligned"])
def test_groups_that_fill_their_products_have_the_same_bits_next_to_one_that_does_not(d_in: int) -> None:
    """Rows of full groups are read and added to in place, and others are copied."""
    full, short = PRODUCT_TOKENS, PRODUCT_TOKENS - 5
    lora = layer(d_in)
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(2 * full + short, d_in, generator=generator)
    together, apart_from_it = torch.arange(len(x)), torch.cat([torch.arange(full), torch.arange(full + short, len(x))])
    found = [
        outputs_and_gradients(lora, x[chosen], counts, seeds)
        for chosen, counts, seeds in (
            (together, (full, short, full), (1, 2, 3)),
            (apart_from_it, (full, full), (1, 3)),
        )
    ]
    (out, grad_x, grads), (own_out, own_grad_x, own_grads) = found
    assert torch.equal(out[apart_from_it], own_out)
    assert torch.equal(grad_x[apart_from_it], own_grad_x)
    assert all(map(torch.equal, [*grads[0:2], *grads[4:6]], own_grads))


def outputs_and_gradients(
    lora: StackedLoraLinear, x: Tensor, counts: tuple[int, ...], seeds: tuple[int, ...]
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return output, gradient of the input, and gradients of A and B of each group."""
    owns = [
        OwnDelta(stack.lora_A[0].detach().requires_grad_(), stack.lora_B[0].detach().requires_grad_(), 0.5)
        for stack in (delta(lora, 1, seed=seed) for seed in seeds)
    ]
    x = x.clone().requires_grad_()
    with routed({"layer": DeltasApart(tuple(owns), counts, PRODUCT_TOKENS)}):
        out = lora(x)
    tensors = [x, *(tensor for own in owns for tensor in (own.lora_A, own.lora_B))]
    grad_x, *grads = torch.autograd.grad(out.square().sum(), tensors)
    return out.detach(), grad_x, grads


def test_rank_padded_with_zeros_adds_nothing_and_receives_exactly_nothing() -> None:
    one = layer()
    x, small = rows(one, 1), delta(one, 1, rank=3)
    padded = StackedDelta(
        nn.functional.pad(small.lora_A.detach(), (0, 0, 0, 5)).requires_grad_(),
        nn.functional.pad(small.lora_B.detach(), (0, 5)).requires_grad_(),
        small.scale,
    )

    with routed({"layer": padded}):
        out = one(x)

    torch.testing.assert_close(out, by_definition(one, x, small))
    _, grad_A, grad_B = gradients(out, x, padded)
    assert not grad_A[:, 3:].any()
    assert not grad_B[:, :, 3:].any()


def test_a_route_ends_with_its_context_even_after_an_error() -> None:
    one = layer()
    x = rows(one, 1)
    outer, inner = delta(one, 1, seed=5), delta(one, 1, seed=6)
    with routed({"layer": outer}):
        expected = one(x)
        with pytest.raises(ZeroDivisionError), routed({"layer": inner}):
            _ = 1 / 0
        assert torch.equal(one(x), expected)
    assert torch.equal(one(x), one.base(x))


def test_a_route_is_its_threads_own() -> None:
    one = layer()
    x = rows(one, 1)
    elsewhere: list[Tensor] = []
    with routed({"layer": delta(one, 1)}):
        # PyTorch gives a new thread as many of its own as the process began with, and so perhaps other last bits.
        thread = threading.Thread(target=lambda: elsewhere.extend((one(x), one.base(x))))
        thread.start()
        thread.join()
    assert torch.equal(*elsewhere)


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("model.layers.0.self_attn.q_proj", "attn"),
        ("model.layers.11.mlp.down_proj", "mlp"),
        ("model.layers.3.mlp.experts.7.up_proj", "mlp"),
        ("lm_head", "unembed"),
        ("model.embed_tokens", None),
        ("model.layers.0.input_layernorm", None),
        ("score", None),
        ("model.layers.3.mlp.experts.w1", "mlp"),
        ("model.layers.3.mlp.shared_experts.up_proj", "mlp"),
        ("model.layers.3.mlp.gate", None),
        ("model.layers.3.mlp.shared_expert_gate", None),
        ("model.layers.3.block_sparse_moe.router", None),
        ("model.layers.3.linear_attn.in_proj_qkvz", "attn"),
        ("model.layers.3.linear_attn.in_proj_ba", None),
        ("model.layers.3.self_attn.indexer.wq_b", None),
        ("model.layers.3.mixer.in_proj", "attn"),
        ("model.layers.3.mixer.up_proj", "mlp"),
    ],
)
def test_modules_belong_to_families_by_their_names(name: str, family: str | None) -> None:
    assert module_family(name) == family
