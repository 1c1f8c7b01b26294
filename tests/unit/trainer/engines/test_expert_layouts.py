"""Adapters of experts in the layouts of other programs add what ours adds."""

from __future__ import annotations

import numpy as np
import pytest
from support.engine.expert_adapters import EXPERTS, HIDDEN, NAME, RANK, WIDTH, expert_adapter
from tinsmith_trainer.engines.peft_layout import expert_modules, fuse_experts, peft_targets, split_experts


def added(tensors: dict[str, np.ndarray], part: str) -> np.ndarray:
    """`[experts, d_out, d_in]`."""
    product: np.ndarray = tensors[f"{NAME}.{part}.lora_B"] @ tensors[f"{NAME}.{part}.lora_A"]
    return product


def peft_delta(lora_A: np.ndarray, lora_B: np.ndarray) -> np.ndarray:
    """Compute the delta as peft.tuners.lora.layer.ParamWrapper.get_delta_weight does."""
    by_expert = lora_A.reshape(EXPERTS, -1, lora_A.shape[1])
    product: np.ndarray = np.einsum("ore,eri->eoi", lora_B.reshape(lora_B.shape[0], -1, EXPERTS), by_expert)
    return product


@pytest.mark.parametrize("by_turns", [False, True])
def test_gate_and_up_are_fused_as_the_weight_has_them(by_turns: bool) -> None:
    tensors = expert_adapter()
    layout = fuse_experts(tensors, RANK, 8.0, {NAME} if by_turns else ())
    up = peft_delta(layout.tensors[f"{NAME}.base_layer.lora_A"], layout.tensors[f"{NAME}.base_layer.lora_B"])
    gate, other = (up[:, ::2], up[:, 1::2]) if by_turns else (up[:, :WIDTH], up[:, WIDTH:])
    np.testing.assert_allclose(gate, added(tensors, "w1"), rtol=1e-5)
    np.testing.assert_allclose(other, added(tensors, "w3"), rtol=1e-5)
    down = peft_delta(layout.tensors[f"{NAME}.lora_A"], layout.tensors[f"{NAME}.lora_B"])
    np.testing.assert_allclose(down, added(tensors, "w2"), rtol=1e-5)
    assert layout.rank_pattern == {f"{NAME}.gate_up_proj": 2 * RANK}
    assert layout.alpha_pattern == {f"{NAME}.gate_up_proj": 16.0}


def test_experts_without_a_gate_keep_their_rank() -> None:
    layout = fuse_experts(expert_adapter(gated=False), RANK, 8.0, ())
    assert layout.parameters == [f"{NAME}.up_proj", f"{NAME}.down_proj"]
    assert not layout.rank_pattern


def test_a_separate_layout_has_matrices_for_each_expert() -> None:
    tensors = expert_adapter()
    apart = split_experts({**tensors, "lm_head.lora_A": np.zeros((RANK, HIDDEN), np.float32)})
    for number in range(EXPERTS):
        for name, part in (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")):
            product = apart[f"{NAME}.{number}.{name}.lora_B"] @ apart[f"{NAME}.{number}.{name}.lora_A"]
            np.testing.assert_allclose(product, added(tensors, part)[number], rtol=1e-5)
    assert apart["lm_head.lora_A"].shape == (RANK, HIDDEN)
    assert expert_modules(apart) == []


def test_former_names_of_experts_are_targets_as_parameters_where_there_are_experts() -> None:
    modules = ["model.layers.0.mlp.gate_proj", "model.layers.0.self_attn.q_proj"]
    assert peft_targets(modules, has_experts=False) == (modules, [])
    assert peft_targets(modules, has_experts=True) == (modules[1:], ["model.layers.0.mlp.gate_proj.weight"])
