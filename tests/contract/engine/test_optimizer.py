"""Each step is torch's AdamW with that step's hyperparameters, after clipping by global norm."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from support.engine.contract import IMPORTANCE_SAMPLING, forward_backward, gradients, group, state_bits, train
from support.engine.datums import policy_datum, sft_datum, with_inputs
from tinsmith_trainer.engines.base import AdamParams, Engine, LossSpec
from tinsmith_trainer.errors import UserError

pytestmark = pytest.mark.core

DATUMS = [sft_datum(length, seed) for seed, length in enumerate((5, 20, 12))]
STEPS = [
    AdamParams(learning_rate=1e-2),
    AdamParams(learning_rate=3e-3, beta1=0.5, beta2=0.99, eps=1e-8, weight_decay=0.1),
    AdamParams(learning_rate=1e-2, grad_clip_norm=0.5),
    AdamParams(learning_rate=0.0),
    AdamParams(learning_rate=1e-2, weight_decay=0.5, grad_clip_norm=1e6),
]


class TorchAdamW:
    """The same steps in plain torch, fed with the engine's own gradients."""

    def __init__(self, engine: Engine) -> None:
        weights = group(engine.state("a"), "weights")
        self.parameters = {name: torch.nn.Parameter(torch.from_numpy(values)) for name, values in weights.items()}
        self._optimizer = torch.optim.AdamW(self.parameters.values())

    def step(self, engine: Engine, params: AdamParams) -> None:
        for name, gradient in gradients(engine).items():
            self.parameters[name].grad = torch.from_numpy(gradient)
        if params.grad_clip_norm > 0:
            torch.nn.utils.clip_grad_norm_(self.parameters.values(), params.grad_clip_norm)
        self._optimizer.param_groups[0].update(
            lr=params.learning_rate,
            betas=(params.beta1, params.beta2),
            eps=params.eps,
            weight_decay=params.weight_decay,
        )
        self._optimizer.step()


def assert_same_weights(engine: Engine, plain: TorchAdamW) -> None:
    for name, values in group(engine.state("a"), "weights").items():
        np.testing.assert_allclose(values, plain.parameters[name].detach().numpy(), atol=1e-6, err_msg=name)


@pytest.mark.core("Engine.optim_step")
def test_steps_with_changing_hyperparameters_equal_torch_adamw(engine: Engine) -> None:
    plain = TorchAdamW(engine)
    for params in STEPS:
        forward_backward(engine, DATUMS)
        plain.step(engine, params)
        engine.optim_step("a", params)
    assert_same_weights(engine, plain)


def test_metrics_hold_the_norm_before_clipping(engine: Engine) -> None:
    forward_backward(engine, DATUMS)
    norm = math.sqrt(sum(float((gradient.astype(np.float64) ** 2).sum()) for gradient in gradients(engine).values()))

    metrics = engine.optim_step("a", AdamParams(learning_rate=1e-3, grad_clip_norm=norm / 10))

    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)


def test_a_step_clears_the_accumulator_and_advances_by_one(engine: Engine) -> None:
    train(engine, DATUMS, steps=3)

    assert not any(gradient.any() for gradient in gradients(engine).values())
    assert engine.state("a").optimizer_step == 3


def test_an_empty_accumulator_counts_as_zero_gradient_and_advances_the_step(engine: Engine) -> None:
    train(engine, DATUMS)
    plain = TorchAdamW(engine)
    moments = {name: group(engine.state("a"), f"adam/{name}") for name in ("exp_avg", "exp_avg_sq")}

    metrics = engine.optim_step("a", AdamParams(learning_rate=1e-2))

    assert metrics["grad_norm"] == 0.0
    assert engine.state("a").optimizer_step == 2
    for name, parameter in plain.parameters.items():
        first, second = moments["exp_avg"][name] * 0.9, moments["exp_avg_sq"][name] * 0.95
        update = (first / (1 - 0.9**2)) / (np.sqrt(second / (1 - 0.95**2)) + 1e-12)
        expected = parameter.detach().numpy() - 1e-2 * np.where(second > 0, update, 0)
        np.testing.assert_allclose(group(engine.state("a"), "weights")[name], expected, atol=1e-6, err_msg=name)


def test_a_non_finite_gradient_fails_the_step_and_changes_only_the_accumulator(engine: Engine) -> None:
    train(engine, DATUMS)
    before = state_bits(engine.state("a"))
    with np.errstate(all="ignore"):
        forward_backward(engine, [policy_datum(5, logprobs=-3e38, advantages=1.0)], loss=IMPORTANCE_SAMPLING)
        with pytest.raises(UserError, match="norm"):
            engine.optim_step("a", AdamParams(learning_rate=1e-2))

    assert state_bits(engine.state("a")) == before


@pytest.mark.parametrize("loss", ["ppo", "gspo"])
def test_a_datum_of_placeholders_for_logprobs_leaves_the_gradient_of_the_others(engine: Engine, loss: str) -> None:
    """Clipping removes its gradient; 0 times an infinite ratio would make that of the whole step NaN."""
    if loss not in engine.capabilities().losses:
        assert engine.capabilities().engine == "reference", "the torch engine has every loss"
        return
    engine.load_state("b", engine.state("a"), with_optimizer=True)
    plain, placeholders = policy_datum(9, 1), policy_datum(7, 2, logprobs=-9999.0, advantages=1.0)
    forward_backward(engine, [plain, placeholders], loss=LossSpec(loss))
    silent = with_inputs(placeholders, advantages=np.zeros(7, np.float32))
    forward_backward(engine, [plain, silent], adapter="b", loss=LossSpec(loss))

    found, expected = (engine.optim_step(name, AdamParams(learning_rate=1e-2))["grad_norm"] for name in "ab")

    assert 0 < found == pytest.approx(expected, rel=1e-5)
