"""Adapters of experts come back from other layouts, unless ours cannot say what they say."""

from __future__ import annotations

import numpy as np
import pytest
from support.engine.expert_adapters import HIDDEN, NAME, RANK, expert_adapter
from tinsmith_trainer.engines.imports.experts import NotShared, fit_shape, to_tinker_experts
from tinsmith_trainer.engines.peft_layout import fuse_experts, split_experts


def came_back(expected: dict[str, np.ndarray], tensors: dict[str, np.ndarray]) -> bool:
    found = to_tinker_experts(tensors, RANK)
    assert found.keys() == expected.keys()
    return all(np.array_equal(fit_shape(found[name], one.shape), one) for name, one in expected.items())


@pytest.mark.parametrize("by_turns", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_fused_parameters_come_apart(gated: bool, by_turns: bool) -> None:
    expected = expert_adapter(gated=gated)
    assert came_back(expected, fuse_experts(expected, RANK, 8.0, {NAME} if by_turns else ()).tensors)


@pytest.mark.parametrize("gated", [False, True])
def test_experts_one_by_one_come_together(gated: bool) -> None:
    expected = expert_adapter(gated=gated)
    assert came_back(expected, split_experts(expected))


def test_an_adapter_that_mixes_gate_and_up_is_refused() -> None:
    tensors = fuse_experts(expert_adapter(), RANK, 8.0, ()).tensors
    tensors[f"{NAME}.base_layer.lora_B"][:] = 1
    with pytest.raises(ValueError, match="mixes gate and up"):
        to_tinker_experts(tensors, RANK)


def test_a_common_factor_is_used_only_if_all_experts_are_equal() -> None:
    whole = np.arange(6, dtype=np.float32).reshape(3, 1, 2)
    assert fit_shape(whole[:1], (3, 1, 2)).shape == (3, 1, 2)
    with pytest.raises(NotShared):
        fit_shape(whole, (1, 1, 2))
    for shape in ((2, 1, 2), (3, 2, 2), (1, 2)):
        with pytest.raises(ValueError, match="another"):
            fit_shape(whole, shape)


def test_a_number_beyond_those_that_are_there_is_refused_at_once() -> None:
    tensors = {f"{NAME}.99999.up_proj.lora_A": np.zeros((RANK, HIDDEN), np.float32)}
    with pytest.raises(ValueError, match="has an expert 99999, but lacks lower ones"):
        to_tinker_experts(tensors, RANK)
