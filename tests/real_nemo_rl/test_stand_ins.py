"""The stand-ins for TransformerEngine's grouped layers: what Megatron asks for, with each expert's product."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytestmark = [pytest.mark.nemo_rl, pytest.mark.timeout(600)]


def parameters_of(protocol: Any) -> list[str]:
    """Names of the parameters of Megatron's protocol of a layer's constructor."""
    return [name for name in inspect.signature(protocol.__call__).parameters if name != "self"]


def alone() -> Any:
    """Process groups of one rank."""
    return SimpleNamespace(rank=lambda: 0, size=lambda: 1)


def test_a_models_experts_are_megatrons_grouped_ones() -> None:
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP

    assert LocalSpecProvider().grouped_mlp_modules(True).func is TEGroupedMLP
    assert LocalSpecProvider().grouped_mlp_modules(False).func is SequentialMLP


def test_a_grouped_layer_is_made_and_called_as_megatron_does_and_multiplies_each_experts_rows() -> None:
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.transformer.moe.experts import GroupedLinearFc1Builder, GroupedLinearFc2Builder

    layers = LocalSpecProvider().grouped_mlp_modules(True).keywords["submodules"]
    groups = SimpleNamespace(ep=alone(), expt_tp=alone(), expt_dp=alone())
    config = SimpleNamespace(params_dtype=torch.float32)
    for make, builder in ((layers.linear_fc1, GroupedLinearFc1Builder), (layers.linear_fc2, GroupedLinearFc2Builder)):
        experts, of_input, of_output = 3, 4, 5
        named = dict.fromkeys(parameters_of(builder)[3:]) | {"config": config, "pg_collection": groups}
        layer = make(experts, of_input, of_output, **named)
        weights = dict(layer.named_parameters())
        assert list(weights) == ["weight0", "weight1", "weight2"], "as Megatron-Bridge's mappings call them"
        for weight in weights.values():
            torch.nn.init.normal_(weight)
        x = torch.randn(6, of_input)
        found, bias = layer(x, [1, 0, 5])
        assert bias is None
        torch.testing.assert_close(found, torch.cat([x[:1] @ weights["weight0"].T, x[1:] @ weights["weight2"].T]))
