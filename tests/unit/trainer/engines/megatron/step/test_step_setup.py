from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tinsmith_trainer.engines.megatron.step.optimizer import check_setup
from torch import nn


def setup(**changes: Any) -> tuple[Any, Any, list[nn.Parameter]]:
    """Return a wrapped model and an optimizer with Megatron's attributes, valid except for `changes`."""
    ddp = nn.Linear(2, 2, bias=False)
    ddp.config = SimpleNamespace(calculate_per_token_loss=True, hidden_dropout=0.0, attention_dropout=0.0)
    ddp.ddp_config = SimpleNamespace(
        average_in_collective=False,
        overlap_grad_reduce=False,
        overlap_param_gather=False,
        check_for_nan_in_grad=False,
        grad_reduce_in_fp32=True,
        num_distributed_optimizer_instances=1,
    )
    adam = SimpleNamespace(
        optimizer="adam",
        decoupled_weight_decay=True,
        fp16=False,
        use_precision_aware_optimizer=False,
        optimizer_cpu_offload=False,
    )
    for name, value in changes.items():
        (owner,) = (one for one in (ddp.config, ddp.ddp_config, adam) if hasattr(one, name))
        setattr(owner, name, value)
    return ddp, SimpleNamespace(chained_optimizers=[SimpleNamespace(config=adam)]), list(ddp.parameters())


def test_sums_in_float32_by_adamw_are_accepted() -> None:
    check_setup(*setup())


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("calculate_per_token_loss", False, "means"),
        ("average_in_collective", True, "means"),
        ("overlap_grad_reduce", True, "before a call's end"),
        ("overlap_param_gather", True, "before a call's end"),
        ("check_for_nan_in_grad", True, "is NaN"),
        ("grad_reduce_in_fp32", False, "not summed in float32"),
        ("num_distributed_optimizer_instances", 2, "several instances"),
        ("hidden_dropout", 0.1, "dropout"),
        ("attention_dropout", 0.1, "dropout"),
        ("optimizer", "sgd", "not AdamW"),
        ("decoupled_weight_decay", False, "not AdamW"),
        ("fp16", True, "float16"),
        ("use_precision_aware_optimizer", True, "cannot be read"),
        ("optimizer_cpu_offload", True, "cannot be read"),
    ],
)
def test_a_loss_that_cannot_be_summed_is_refused_with_the_reason(name: str, value: object, why: str) -> None:
    with pytest.raises(ValueError, match=f"Adapters cannot be trained on this model: .*{why}"):
        check_setup(*setup(**{name: value}))


def test_the_trained_parameters_must_be_the_adapter_and_have_one_type() -> None:
    ddp, optimizer, parameters = setup()
    with pytest.raises(ValueError, match="no matrices to train"):
        check_setup(ddp, optimizer, [])
    with pytest.raises(ValueError, match="not those of the adapters"):
        check_setup(ddp, optimizer, [nn.Parameter(torch.zeros(2, 2))])
    ddp.other = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="several types"):
        check_setup(ddp, optimizer, [*parameters, ddp.other])
    ddp.other.requires_grad_(False)
    check_setup(ddp, optimizer, parameters)
