from __future__ import annotations

from types import SimpleNamespace

from megatron.core.transformer.module import Float16Module
from tinsmith_trainer.engines.megatron.model.schedule import _precision
from torch import nn


def test_hidden_states_of_a_model_in_half_precision_stay_unconverted() -> None:
    half = Float16Module.__new__(Float16Module)
    nn.Module.__init__(half)
    assert _precision(SimpleNamespace(module=half)) == {"fp32_output": False}
    assert _precision(SimpleNamespace(module=nn.Identity())) == {}
