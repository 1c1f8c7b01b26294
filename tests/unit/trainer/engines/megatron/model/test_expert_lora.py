from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tinsmith_trainer.engines.megatron.model.expert_lora import (
    ExpertSizes,
    ExpertsLora,
    place_experts,
)
from tinsmith_trainer.engines.megatron.model.weights import Part
from tinsmith_trainer.torch_model.experts import DOWN, GATE, UP
from torch import Tensor, nn
from typing_extensions import override

HERE, HIDDEN, INNER = 3, 16, 24
SIZES = ExpertSizes(experts=2 * HERE, hidden=HIDDEN, inner=INNER)


class OfOne(nn.Module):
    """A parallel linear layer of Megatron's, of one expert."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = weight

    @override
    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return x @ self.weight.T, None


class OfAll(nn.Module):
    """TransformerEngine's grouped linear layer: told how many rows are each expert's."""

    def __init__(self, weights: list[Tensor]) -> None:
        super().__init__()
        self.weights = weights

    @override
    def forward(self, x: Tensor, m_splits: list[int]) -> tuple[Tensor, None]:
        parts = zip(torch.split(x, m_splits), self.weights, strict=True)
        return torch.cat([rows @ weight.T for rows, weight in parts]), None


def drawn_lora(seed: int, ranks: int = 2) -> ExpertsLora:
    lora = ExpertsLora("mlp.experts", SIZES, Part(0, ranks), 8, like=torch.empty(0))
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in lora.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw))
    lora.scale = 0.5
    return lora


def weights(out: int, given: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(7)
    return [torch.randn(out, given, generator=draw) for _ in range(HERE)]


def one_by_one(lora: ExpertsLora) -> nn.Module:
    """Arrange the experts as SequentialMLP does."""
    experts = nn.Module()
    experts.local_experts = nn.ModuleList()
    for fc1, fc2 in zip(weights(2 * INNER, HIDDEN), weights(HIDDEN, INNER), strict=True):
        expert = nn.Module()
        expert.linear_fc1, expert.linear_fc2 = OfOne(fc1), OfOne(fc2)
        experts.local_experts.append(expert)
    place_experts(experts, lora)
    return experts


def all_at_once(lora: ExpertsLora) -> nn.Module:
    """Arrange the experts as TEGroupedMLP does."""
    experts = nn.Module()
    experts.linear_fc1, experts.linear_fc2 = OfAll(weights(2 * INNER, HIDDEN)), OfAll(weights(HIDDEN, INNER))
    place_experts(experts, lora)
    return experts


@given(counts=st.lists(st.integers(0, 5), min_size=HERE, max_size=HERE), seed=st.integers(0, 99))
@settings(max_examples=20)
@pytest.mark.parametrize(("layer", "width"), [("linear_fc1", HIDDEN), ("linear_fc2", INNER)])
def test_experts_that_are_computed_at_once_have_the_deltas_and_gradients_of_each_by_itself(
    layer: str, width: int, counts: list[int], seed: int
) -> None:
    one, other = drawn_lora(seed), drawn_lora(seed)
    x = torch.randn(sum(counts), width, generator=torch.Generator().manual_seed(seed)).requires_grad_()
    own = zip(one_by_one(one).local_experts, torch.split(x, counts), strict=True)  # type: ignore[call-overload]
    apart = torch.cat([getattr(expert, layer)(rows)[0] for expert, rows in own])
    together, bias = getattr(all_at_once(other), layer)(x, counts)
    assert bias is None
    torch.testing.assert_close(together, apart, atol=1e-4, rtol=1e-4)
    for found in (apart, together):
        found.square().sum().backward()
    for (name, separate), (_, joined) in zip(one.named_parameters(), other.named_parameters(), strict=True):
        expected = torch.zeros_like(separate) if separate.grad is None else separate.grad
        got = torch.zeros_like(separate) if joined.grad is None else joined.grad
        torch.testing.assert_close(got, expected, atol=1e-2, rtol=1e-4, msg=name)


def test_a_rank_takes_part_even_if_its_experts_get_no_token() -> None:
    x = torch.zeros(0, HIDDEN, requires_grad=True)
    found, _ = all_at_once(drawn_lora(0)).linear_fc1(x, [0] * HERE)  # type: ignore[operator]
    assert found.shape == (0, 2 * INNER)
    found.sum().backward()


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_sum_shared_gradients_and_not_those_of_their_own_experts(ranks: int) -> None:
    """Megatron reads an attribute of the parameter. A rank with all experts has none of its own."""
    lora = drawn_lora(0, ranks)
    for key, own in ((GATE, "B"), (UP, "B"), (DOWN, "A")):
        for name, factor in zip("AB", lora.factors(key), strict=True):
            shared = name != own or ranks == 1
            assert (factor.allreduce, factor.sequence_parallel) == (shared, shared)  # type: ignore[attr-defined]
            assert len(factor) == (1 if name != own else 2 * HERE // ranks)
