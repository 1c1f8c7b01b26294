"""Custom losses on the PEFT engine: a datum has its own numbers, a call its own failure, and no other call waits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from support.engine.contract import CROSS_ENTROPY, forward_backward
from support.engine.datums import policy_datum, sft_datum, with_inputs, without_input
from support.engine.graphs import node, ref, traced_id, written
from support.engine.peft import new_engine
from tinsmith_rpc.custom_losses import loss_id_of
from tinsmith_trainer.engines.base import Datum, Engine, LossSpec, Numerics, Work
from tinsmith_trainer.engines.losses import VALID, prepare_loss
from tinsmith_trainer.engines.peft import PeftEngineSettings
from tinsmith_trainer.errors import UserError
from torch import Tensor


def own(fn: Callable[..., Any], **ranks: int) -> LossSpec:
    return LossSpec("custom", {"loss_id": traced_id(fn, **ranks)})


def weighted(logprobs: Tensor, weights: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    return -(logprobs * weights).sum(), {"custom/tokens:sum": weights.sum(), "custom/largest:mean": weights.max()}


def of_nothing(logprobs: Tensor, weights: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    return logprobs[weights > 9].mean(), {}


def importance(logprobs: Tensor, sampled: Tensor, advantages: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    return -((logprobs - sampled).exp() * advantages).sum(), {}


WEIGHTED = own(weighted, logprobs=1, weights=1)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return new_engine()


def gradients(engine: Engine, datums: Sequence[Datum], loss: LossSpec) -> np.ndarray[Any, Any]:
    engine.clear_gradients("a")
    forward_backward(engine, datums, loss=loss)
    tensors = engine.state("a").tensors
    return np.concatenate([tensors[name].ravel() for name in sorted(tensors) if name.startswith("gradients/")])


def test_a_weighted_sum_is_cross_entropy_to_the_bit(engine: Engine) -> None:
    datums = [sft_datum(length, weights=0.5) for length in (3, 9, 40)]
    one, other = (forward_backward(engine, datums, loss=loss) for loss in (WEIGHTED, CROSS_ENTROPY))
    assert [o["logprobs"].tolist() for o in one.outputs] == [o["logprobs"].tolist() for o in other.outputs]
    assert one.metrics["loss:sum"] == pytest.approx(other.metrics["loss:sum"], rel=1e-6)
    assert (one.metrics["custom/tokens:sum"], one.metrics["custom/largest:mean"]) == (26.0, 0.5)
    assert np.array_equal(gradients(engine, datums, WEIGHTED), gradients(engine, datums, CROSS_ENTROPY))


def test_importance_sampling_by_hand(engine: Engine) -> None:
    datums = [policy_datum(length) for length in (4, 11)]
    renamed = [with_inputs(datum, sampled=datum.loss_inputs["logprobs"]) for datum in datums]
    found = gradients(engine, renamed, own(importance, logprobs=1, sampled=1, advantages=1))
    expected = gradients(engine, datums, LossSpec("importance_sampling"))
    assert np.allclose(found, expected, rtol=1e-5, atol=1e-7)


def test_the_result_of_a_datum_does_not_depend_on_its_batch(engine: Engine) -> None:
    datums = [sft_datum(length) for length in (5, 17, 33)]
    together = forward_backward(engine, datums, loss=WEIGHTED)
    alone = [forward_backward(engine, [datum], loss=WEIGHTED) for datum in datums]
    for index, own_outcome in enumerate(alone):
        assert together.outputs[index]["logprobs"].tolist() == own_outcome.outputs[0]["logprobs"].tolist()
    assert together.metrics["loss:sum"] == sum(outcome.metrics["loss:sum"] for outcome in alone)


@pytest.mark.slow("trains several models")
def test_a_failure_is_the_calls_and_leaves_no_trace(engine: Engine) -> None:
    before = gradients(engine, [sft_datum(8)], CROSS_ENTROPY)
    with pytest.raises(UserError, match="'of_nothing' is nan for a datum of 5 tokens"):
        forward_backward(
            engine, [sft_datum(8, weights=10.0), sft_datum(5)], loss=own(of_nothing, logprobs=1, weights=1)
        )
    tensors = engine.state("a").tensors
    after = [tensors[name].ravel() for name in sorted(tensors) if name.startswith("gradients/")]
    assert np.array_equal(np.concatenate(after), before)


def test_a_target_that_the_model_rules_out_has_no_gradient_where_the_loss_masks_it() -> None:
    def masked(logprobs: Tensor, weights: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return -logprobs.masked_fill(weights == 0, 0.0).sum(), {}

    loss = prepare_loss(own(masked, logprobs=1, weights=1), [sft_datum(2, weights=[1.0, 0.0])], custom=True)
    logprobs = torch.tensor([[-1.5, -math.inf]], requires_grad=True)
    inputs = {"weights": torch.tensor([[1.0, 0.0]]), VALID: torch.ones(1, 2, dtype=torch.bool)}

    total = loss(logprobs, inputs).loss.sum()
    total.backward()

    assert logprobs.grad is not None
    assert (total.item(), logprobs.grad.tolist()) == (1.5, [[-1.0, 0.0]])


@pytest.mark.parametrize(
    ("datum", "message"),
    [
        (without_input(sft_datum(5), "weights"), "Datum 0: the custom loss needs the input weights"),
        (without_input(sft_datum(5), "target_tokens"), "Datum 0: custom needs the input target_tokens"),
        (with_inputs(sft_datum(5), weights=np.float32(1)), r"weights has shape \[\]; the custom loss declares rank 1"),
        (with_inputs(sft_datum(5), weights=np.ones(4, np.float32)), r"weights has shape \[4\].*one row per token"),
        (sft_datum(5, targets=2), "declares rank 1"),
    ],
)
def test_a_datum_that_the_loss_does_not_fit_is_named(engine: Engine, datum: Datum, message: str) -> None:
    with pytest.raises(UserError, match=message):
        engine.start(Work("a", [datum], WEIGHTED))


@pytest.mark.parametrize("config", [{}, {"loss_id": 1.0}, {"loss_id": "none"}, WEIGHTED.config | {"beta": 0.1}])
def test_a_config_that_is_not_just_a_loss_is_refused(engine: Engine, config: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="loss_id"):
        engine.start(Work("a", [sft_datum(5)], LossSpec("custom", config)))


def test_too_many_combinations_of_types_are_refused(engine: Engine) -> None:
    names = [f"x{i}" for i in range(5)]
    loss_id = loss_id_of(written(node("loss", "sum", ref("logprobs"), op="call_method"), inputs=names))
    values = {True: np.ones(3, np.int64), False: np.ones(3, np.float32)}
    datums = [
        with_inputs(sft_datum(3), **{name: values[bool(kind >> bit & 1)] for bit, name in enumerate(names)})
        for kind in range(32)
    ]
    with pytest.raises(UserError, match="32 combinations of types"):
        engine.start(Work("a", datums, LossSpec("custom", {"loss_id": loss_id})))


def test_an_engine_that_runs_none_says_what_to_do() -> None:
    with pytest.raises(UserError, match="runs it on the client"):
        prepare_loss(WEIGHTED, [sft_datum(5)])


@pytest.mark.parametrize("numerics", ["exact", "fast"])
def test_a_call_with_a_custom_loss_shares_no_forward(numerics: Numerics) -> None:
    """All custom losses have one name, so that two of them would otherwise be taken for one loss."""
    sharing = new_engine(PeftEngineSettings(numerics=numerics, cobatch_tokens=2**20))
    own_losses = [WEIGHTED, own(of_nothing, logprobs=1, weights=1)]
    calls = [sharing.start(Work("a", [sft_datum(8)], loss)) for loss in (*own_losses, CROSS_ENTROPY)]
    for waiting in (calls, calls[1:], calls[::-1]):
        assert list(sharing.cobatch(waiting)) == waiting[:1]
