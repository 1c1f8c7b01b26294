"""Adapters of experts: what they add, and that a token's bits do not depend on who was sent where."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from support.tiny_models import tiny_model
from tinsmith_trainer.engines.base import LoraSpec
from tinsmith_trainer.parity.reference import add_to_experts, trained_by_experts
from tinsmith_trainer.torch_model.expert_products import PRODUCT_TOKENS, Assignment, by_expert
from tinsmith_trainer.torch_model.experts import expert_projections, unadaptable_experts
from tinsmith_trainer.torch_model.lora import DeltasApart, OwnDelta, routed
from torch import nn
from transformers import AutoModelForCausalLM

EXPERTS = "model.layers.0.mlp.experts"
HIDDEN, RANK = 64, 4
LORA = LoraSpec(rank=RANK, alpha=8.0, seed=0)


def deltas(seed: int) -> dict[str, OwnDelta]:
    """Return the deltas of the first layer's experts, by projection."""
    torch.manual_seed(seed)
    layers = tiny_model("qwen3-moe").layers
    return {
        name: OwnDelta(*(torch.randn(shape).mul(0.1).requires_grad_() for shape in layers[name].lora_shapes(RANK)), 2.0)
        for name in layers
        if name.startswith(EXPERTS)
    }


def computed(
    x: torch.Tensor, chosen: torch.Tensor, adapters: Sequence[dict[str, OwnDelta] | None], sizes: Sequence[int]
) -> torch.Tensor:
    names = [name for name in tiny_model("qwen3-moe").layers if name.startswith(EXPERTS)]
    route = {
        name: DeltasApart(tuple(own and own[name] for own in adapters), tuple(sizes), PRODUCT_TOKENS) for name in names
    }
    weights = torch.full(chosen.shape, 0.5)
    with routed(route):
        out: torch.Tensor = tiny_model("qwen3-moe").model.get_submodule(EXPERTS)(x, chosen, weights)
    return out


def tokens(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    return torch.randn(count, HIDDEN), torch.stack([torch.randperm(8)[:2] for _ in range(count)])


def test_experts_with_an_adapter_equal_experts_with_it_added_to_their_weights() -> None:
    own, (x, chosen) = deltas(0), tokens(40, 1)
    plain = AutoModelForCausalLM.from_pretrained(tiny_model("qwen3-moe").directory, dtype=torch.float32)
    found = {name: layer for name, layer in expert_projections(plain).items() if name.startswith(EXPERTS)}
    add_to_experts(plain, found, LORA)
    trained = trained_by_experts(plain)
    with torch.no_grad():
        for name, delta in own.items():
            trained[f"{name}.lora_A"].copy_(delta.lora_A)
            trained[f"{name}.lora_B"].copy_(delta.lora_B)

    with_adapter = computed(x, chosen, [own], [40])
    with_added_weights = plain.get_submodule(EXPERTS)(x, chosen, torch.full(chosen.shape, 0.5))
    torch.testing.assert_close(with_adapter, with_added_weights, rtol=1e-4, atol=1e-5)
    with_adapter.square().sum().backward()
    with_added_weights.square().sum().backward()
    for name, delta in own.items():
        torch.testing.assert_close(delta.lora_A.grad, trained[f"{name}.lora_A"].grad, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(delta.lora_B.grad, trained[f"{name}.lora_B"].grad, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("threads", [1, 3])
def test_neither_outputs_nor_gradients_depend_on_company(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        alone, together = deltas(0), deltas(0)
        (x, chosen), (other, others_choice) = tokens(21, 1), tokens(50, 2)
        by_itself = computed(x, chosen, [alone], [21])
        by_itself.square().sum().backward()
        both = computed(torch.cat([other, x]), torch.cat([others_choice, chosen]), [deltas(3), together], [50, 21])
        both.square().sum().backward()
    finally:
        torch.set_num_threads(before)
    assert torch.equal(both[50:], by_itself)
    for name in alone:
        assert torch.equal(together[name].lora_A.grad, alone[name].lora_A.grad), name
        assert torch.equal(together[name].lora_B.grad, alone[name].lora_B.grad), name


def test_tokens_without_an_adapter_have_the_bits_of_the_base_model() -> None:
    (x, chosen), own = tokens(30, 1), deltas(0)
    bare = computed(x, chosen, [None], [30])
    assert torch.equal(computed(x, chosen, [own, None], [12, 18])[12:], bare[12:])
    assert not torch.equal(computed(x, chosen, [own, None], [12, 18])[:12], bare[:12])


def test_an_expert_that_no_token_came_to_has_a_gradient_of_zero() -> None:
    weight = torch.randn(3, 5, 4, requires_grad=True)
    sent = Assignment.of(torch.tensor([[0], [2]]), 3)
    by_expert(sent.to_experts(torch.randn(2, 4)), weight, sent.counts).sum().backward()
    assert weight.grad is not None
    assert weight.grad[1].abs().sum() == 0
    assert weight.grad[[0, 2]].abs().sum() > 0


def test_experts_in_another_form_are_recognized() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_up_proj = nn.Parameter(torch.zeros(2, 4, 8))

    model = nn.ModuleDict({"mlp": nn.ModuleDict({"experts": Experts()})})
    assert unadaptable_experts(model) == ("mlp.experts",)
    assert unadaptable_experts(tiny_model("qwen3-moe").model) == ()
