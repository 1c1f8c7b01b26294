"""PEFT engines with adapters that have been trained a little, and a comparison of two engines."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from support.engine.contract import forward_backward, gradients, spec, train
from support.engine.datums import sft_datum
from support.tiny_models import tiny_model
from tinsmith_trainer.engines.base import Datum, LoraSpec
from tinsmith_trainer.engines.peft import PeftEngine, PeftEngineSettings, build_peft_engine
from tinsmith_trainer.torch_model.loading import TorchModel

DATUMS = [sft_datum(length, seed) for seed, length in enumerate((5, 20, 12, 40))]


def new_engine(settings: PeftEngineSettings | None = None, model: TorchModel | None = None) -> PeftEngine:
    """Build an engine with adapters `a` and `b`, both trained a little."""
    engine = build_peft_engine(model or tiny_model(), settings)
    for seed, adapter in enumerate("ab"):
        engine.create_adapter(adapter, LoraSpec(rank=8, alpha=32.0, seed=seed))
        train(engine, DATUMS, adapter=adapter)
    return engine


def assert_alike(found: PeftEngine, expected: PeftEngine, datums: Sequence[Datum], rounding: float = 1e-4) -> None:
    """Compare logprobs and gradients of one adapter after two steps on two engines that have no adapters yet.

    `rounding` bounds logprobs, and gradients as a part of their largest element.
    """
    expected.create_adapter("a", spec(expected))
    train(expected, datums, steps=2)
    found.load_state("a", expected.state("a"), with_optimizer=True)
    found_outputs, expected_outputs = (forward_backward(engine, datums).outputs for engine in (found, expected))
    for one, other in zip(found_outputs, expected_outputs, strict=True):
        np.testing.assert_allclose(one["logprobs"], other["logprobs"], atol=rounding)
    wanted = gradients(expected)
    for name, gradient in gradients(found).items():
        atol = rounding * np.abs(wanted[name]).max()
        np.testing.assert_allclose(gradient, wanted[name], rtol=0, atol=atol, err_msg=name)
