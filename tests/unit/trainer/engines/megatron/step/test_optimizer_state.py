"""Optimizer state in one process; `tests/contract/megatron` has several ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tinsmith_trainer.engines.megatron.model.cpu_megatron import cpu_megatron
from tinsmith_trainer.engines.megatron.step.optimizer import OptimizerState
from torch import nn
from typing_extensions import override


class GroupStepAdam(torch.optim.Optimizer):
    """Keeps one step a parameter group, as TransformerEngine's and Apex's fused Adam do."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__([{"params": parameters}], {})

    @override
    def step(self, closure: Any = None) -> None:
        raise NotImplementedError


def wrapped(inner: torch.optim.Optimizer) -> Any:
    """Wrap as Megatron's optimizer does on float32 parameters."""
    return SimpleNamespace(is_stub_optimizer=False, optimizer=inner, param_groups=inner.param_groups)


@pytest.fixture
def parameters() -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(2, 3)), nn.Parameter(torch.randn(4, 1))]


def state_of(inner: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> OptimizerState:
    with cpu_megatron():
        return OptimizerState(wrapped(inner), parameters)


def stepped(parameters: list[nn.Parameter]) -> torch.optim.AdamW:
    inner = torch.optim.AdamW(parameters)
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    inner.step()
    return inner


def test_moments_are_read_and_set_by_parameter(parameters: list[nn.Parameter]) -> None:
    inner = stepped(parameters)
    state = state_of(inner, parameters)
    first, second = state.moments()
    wanted = torch.cat([inner.state[parameter]["exp_avg"].flatten() for parameter in parameters])
    assert torch.equal(first, wanted)
    state.set_moments(7, (second, first))
    assert torch.equal(state.moments()[0], second)
    assert [inner.state[parameter]["step"].item() for parameter in parameters] == [7.0, 7.0]
    assert [inner.state[parameter]["exp_avg"].shape for parameter in parameters] == [(2, 3), (4, 1)]


def test_an_adam_with_a_step_for_each_group_gets_it_there(parameters: list[nn.Parameter]) -> None:
    inner = GroupStepAdam(parameters)
    state = state_of(inner, parameters)
    state.set_moments(7, (torch.ones(10), torch.ones(10)))
    assert [group["step"] for group in inner.param_groups] == [7]
    assert all("step" not in inner.state[parameter] for parameter in parameters)
    state.set_moments(0, None)
    assert all("step" not in group for group in inner.param_groups)


@pytest.mark.parametrize(("largest", "scale"), [(0.0, 1.0), (5.0, 1.0), (1.0, 0.5)])
def test_gradients_above_the_largest_norm_are_scaled_down_to_it(
    parameters: list[nn.Parameter], largest: float, scale: float
) -> None:
    inner = torch.optim.AdamW(parameters)
    parameters[0].grad, parameters[1].grad = torch.zeros(2, 3), torch.ones(4, 1)
    state_of(inner, parameters).clip(2.0, largest)
    torch.testing.assert_close(parameters[1].grad, torch.full((4, 1), scale))
