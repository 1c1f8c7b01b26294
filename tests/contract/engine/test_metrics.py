"""The metrics that an engine reports with its outputs."""

from __future__ import annotations

import pytest
from support.engine.contract import forward_backward
from support.engine.datums import policy_datum, sft_datum
from tinsmith_trainer.engines.base import Engine, LossSpec
from tinsmith_trainer.engines.losses import loss_names

pytestmark = pytest.mark.core

REDUCTIONS = {"mean", "sum", "min", "max", "slack", "hash2", "unique"}
"""The reductions by which the SDK combines chunks; it drops any other silently."""


@pytest.mark.parametrize("loss", loss_names())
def test_trap_11_every_metric_name_has_one_colon_and_a_reduction_of_the_sdk(engine: Engine, loss: str) -> None:
    if loss not in engine.capabilities().losses:
        assert engine.capabilities().engine == "reference", "the torch engine has every loss"
        return
    datum = sft_datum(5) if loss == "cross_entropy" else policy_datum(5)
    metrics = forward_backward(engine, [datum, datum], loss=LossSpec(loss)).metrics
    assert "loss:sum" in metrics
    for name in metrics:
        label, reduction = name.split(":")
        assert label
        assert reduction in REDUCTIONS
