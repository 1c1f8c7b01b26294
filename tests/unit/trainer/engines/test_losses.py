"""Each loss against its formula, written out again per token in plain numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engine.datums import policy_datum, sft_datum, with_inputs, without_input
from tinsmith_trainer.engines.base import Datum, LossSpec
from tinsmith_trainer.engines.batching import pad, plan_microbatches
from tinsmith_trainer.engines.losses import VALID, PreparedLoss, Terms, loss_names, prepare_loss
from tinsmith_trainer.errors import UserError

POLICY_LOSSES = ("importance_sampling", "ppo", "cispo", "gspo", "dro")
LP = [-1.0, -2.0, -0.5, -3.0]
Q = [-1.5, -1.0, -0.5, -2.0]
A = [1.0, -2.0, 0.0, 0.5]
RATIO = [math.exp(lp - q) for lp, q in zip(LP, Q, strict=True)]  # 1.65, 0.37, 1, 0.37


def datum(**inputs: object) -> Datum:
    """Four tokens with the numbers above."""
    return policy_datum(4, **({"logprobs": Q, "advantages": A} | inputs))


def evaluate(loss: PreparedLoss, lp: torch.Tensor, *, padding: int = 0) -> Terms:
    """Return the loss of one datum whose logprobs are `lp`, followed by padding."""
    width = len(loss.arrays[0]["advantages" if "advantages" in loss.arrays[0] else "weights"])
    inputs = {name: torch.from_numpy(np.array(values))[None] for name, values in loss.arrays[0].items()}
    inputs[VALID] = torch.ones(1, width, dtype=torch.bool)
    if padding:
        inputs = {name: torch.nn.functional.pad(values, (0, padding)) for name, values in inputs.items()}
    return loss(lp, inputs)


def value_and_slope(
    name: str, datum: Datum, config: Mapping[str, float] | None = None, *, lp: list[float] = LP
) -> tuple[float, list[float]]:
    logprobs = torch.tensor([lp], requires_grad=True)
    total = evaluate(prepare_loss(LossSpec(name, config or {}), [datum]), logprobs).loss.sum()
    total.backward()
    assert logprobs.grad is not None
    return total.item(), logprobs.grad[0].tolist()


def test_cross_entropy_is_minus_weight_times_logprob() -> None:
    value, slope = value_and_slope("cross_entropy", sft_datum(4, weights=[1.0, -2.0, 0.0, 0.5]))
    assert value == pytest.approx(1.0 - 4.0 + 0.0 + 1.5)
    assert slope == pytest.approx([-1.0, 2.0, 0.0, -0.5])


def test_importance_sampling_is_minus_ratio_times_advantage() -> None:
    value, slope = value_and_slope("importance_sampling", datum())
    assert value == pytest.approx(-sum(r * a for r, a in zip(RATIO, A, strict=True)))
    assert slope == pytest.approx([-r * a for r, a in zip(RATIO, A, strict=True)])


def test_ppo_takes_the_smaller_of_free_and_clipped() -> None:
    value, slope = value_and_slope("ppo", datum())
    # Token 0 is clipped from above at 1.2, token 1 from below at 0.8; token 3 lies below but gains by rising.
    assert value == pytest.approx(-(1.2 * 1.0 + 0.8 * -2.0 + RATIO[3] * 0.5))
    assert slope == pytest.approx([0.0, 0.0, 0.0, -RATIO[3] * 0.5])


def test_cispo_weighs_the_logprob_with_a_clipped_ratio_that_has_no_gradient() -> None:
    config = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
    value, slope = value_and_slope("cispo", datum(), config)
    coefficients = [1.2 * 1.0, 0.8 * -2.0, 0.0, 0.8 * 0.5]
    assert value == pytest.approx(-sum(c * lp for c, lp in zip(coefficients, LP, strict=True)))
    assert slope == pytest.approx([-c for c in coefficients])


def test_gspo_gives_every_token_the_ratio_of_the_masked_mean() -> None:
    value, slope = value_and_slope("gspo", datum(sequence_ratio_mask=[1.0, 1.0, 1.0, 0.0]))
    ratio = math.exp((0.5 - 1.0 + 0.0) / 3)  # 0.846, inside the thresholds
    assert value == pytest.approx(-ratio * sum(A))
    assert slope == pytest.approx([-ratio * a for a in A])


def test_gspo_clips_the_sequences_ratio() -> None:
    value, slope = value_and_slope("gspo", datum(logprobs=[-1.0, -2.0, -0.5, -6.0], advantages=[1.0, 1.0, 0.0, -1.0]))
    # Ratio e^1: advantages above 0 are held at 1.2, those below 0 are not.
    assert value == pytest.approx(-(1.2 + 1.2 - math.e))
    assert slope == pytest.approx([0.0, 0.0, 0.0, math.e])


def test_dro_penalises_every_token_of_the_datum() -> None:
    value, slope = value_and_slope("dro", datum(advantages=0.0), {"beta": 0.1})
    assert value == pytest.approx(0.05 * (0.25 + 1.0 + 0.0 + 1.0))
    assert slope == pytest.approx([0.1 * (lp - q) for lp, q in zip(LP, Q, strict=True)])


@pytest.mark.parametrize("name", ["ppo", "gspo"])
@pytest.mark.parametrize(("threshold", "bound"), [("clip_low_threshold", 0.8), ("clip_high_threshold", 1.2)])
def test_clipping_losses_hold_the_ratio_between_ratios_by_default(name: str, threshold: str, bound: float) -> None:
    default = value_and_slope(name, datum())
    assert value_and_slope(name, datum(), {threshold: bound}) == default
    assert value_and_slope(name, datum(), {"clip_low_threshold": 0.0, "clip_high_threshold": 99.0}) != default


@pytest.mark.parametrize("name", ["ppo", "cispo", "gspo"])
def test_a_per_token_threshold_beats_the_config_and_the_config_the_default(name: str) -> None:
    far = datum(logprobs=[-4.0, -4.0, -4.0, -4.0])
    by_config = value_and_slope(name, far, {"clip_high_threshold": 1.5})
    by_token = value_and_slope(name, with_inputs(far, clip_high_threshold=np.full(4, 1.5, np.float32)))

    assert by_config == by_token
    assert by_config != value_and_slope(name, far)
    both = with_inputs(far, clip_high_threshold=np.full(4, 1.5, np.float32))
    assert value_and_slope(name, both, {"clip_high_threshold": 1.3}) == by_token


def test_the_kl_coefficient_of_stable_reinforce_pulls_tokens_with_an_advantage_towards_the_sampler() -> None:
    far = datum(logprobs=[-1.5, -1.0, -9.0, -2.0])
    value, slope = value_and_slope("stable_reinforce", far, {"kl_coeff": 0.1})
    without, slope_without = value_and_slope("cispo", far)
    assert value == pytest.approx(without + 0.05 * (0.25 + 1.0 + 1.0))
    assert slope == pytest.approx([own + 0.1 * gap for own, gap in zip(slope_without, [0.5, -1, 0, -1], strict=True)])


@pytest.mark.parametrize("name", ["importance_sampling", "ppo", "cispo", "gspo", "stable_reinforce"])
def test_a_token_without_advantage_may_have_an_overflowing_ratio(name: str) -> None:
    value, slope = value_and_slope(name, datum(logprobs=[-1.5, -1.0, -200.0, -2.0]))
    assert math.isfinite(value)
    assert slope[2] == 0.0
    assert all(math.isfinite(part) for part in slope)


@pytest.mark.parametrize("name", ["importance_sampling", "ppo", "cispo", "gspo", "stable_reinforce"])
def test_a_token_without_advantage_may_have_an_impossible_target(name: str) -> None:
    value, slope = value_and_slope(
        name, datum(sequence_ratio_mask=[1, 1, 0, 1]) if name == "gspo" else datum(), lp=[-1.0, -2.0, -math.inf, -3.0]
    )
    assert math.isfinite(value)
    assert slope[2] == 0.0


def test_a_token_without_weight_may_have_an_impossible_target() -> None:
    value, slope = value_and_slope("cross_entropy", sft_datum(4, weights=[1, 1, 0, 1]), lp=[-1, -2, -math.inf, -3])
    assert value == pytest.approx(6.0)
    assert slope[2] == 0.0


floats = st.floats(-4, 4, width=32)


@pytest.mark.parametrize("name", ["cross_entropy", *POLICY_LOSSES])
@settings(deadline=None)
@given(data=st.data())
def test_padding_adds_nothing(name: str, data: st.DataObject) -> None:
    length = data.draw(st.integers(1, 6))
    lists = st.lists(floats, min_size=length, max_size=length)
    lp = torch.tensor([data.draw(lists)])
    example = (
        sft_datum(length, weights=data.draw(lists))
        if name == "cross_entropy"
        else policy_datum(length, logprobs=data.draw(lists), advantages=data.draw(lists))
    )
    loss = prepare_loss(LossSpec(name), [example])

    plain = evaluate(loss, lp)
    padded = evaluate(loss, torch.nn.functional.pad(lp, (0, 3), value=-7.0), padding=3)

    torch.testing.assert_close(padded.loss[:, :length], plain.loss)
    assert not padded.loss[:, length:].any()
    for metric, values in plain.metrics.items():
        torch.testing.assert_close(padded.metrics[metric], values)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_on_policy_every_gradient_is_that_of_reinforce(name: str) -> None:
    _, slope = value_and_slope(name, datum(logprobs=LP))
    assert slope == pytest.approx([-a for a in A])


def test_metrics_count_trained_and_clipped_tokens_and_the_gap_to_the_sampler() -> None:
    terms = evaluate(prepare_loss(LossSpec("ppo"), [datum()]), torch.tensor([LP]))
    metrics = {name: values.tolist() for name, values in terms.metrics.items()}
    assert metrics == {
        "tokens:sum": [3],
        "clipped:sum": [2],
        "sampler_kl:sum": [pytest.approx(-0.5 + 1.0 + 1.0)],
        "sampler_gap:max": [1.0],
    }


def test_a_microbatch_of_datums_with_and_without_optional_inputs_is_complete() -> None:
    datums = [datum(), with_inputs(datum(), clip_high_threshold=np.full(4, 1.5, np.float32))]
    loss = prepare_loss(LossSpec("ppo", {"clip_high_threshold": 1.3}), datums)
    [microbatch] = plan_microbatches(datums, max_length=64, token_budget=1024)

    arrays = pad(microbatch, datums, loss.arrays)

    assert arrays.loss_inputs["clip_high_threshold"][:2, 0].tolist() == pytest.approx([1.3, 1.5])


def test_an_input_of_one_token_needs_no_shape() -> None:
    loss = prepare_loss(LossSpec("cross_entropy"), [with_inputs(sft_datum(1), weights=np.float32(0.5))])
    assert loss.arrays[0]["weights"].tolist() == [0.5]


def test_every_loss_a_client_may_ask_for_has_a_function_or_a_stand_in() -> None:
    assert loss_names() == ("cross_entropy", *POLICY_LOSSES, "stable_reinforce")
    assert loss_names(map_stable_reinforce=False) == ("cross_entropy", *POLICY_LOSSES)


@pytest.mark.parametrize("name", ["stable_reinforce", "", "PPO"])
def test_an_unknown_loss_is_refused_with_those_there_are(name: str) -> None:
    with pytest.raises(UserError, match=r"Unknown loss .*cross_entropy, importance_sampling, ppo, cispo, gspo, dro"):
        prepare_loss(LossSpec(name, {}), [datum()], map_stable_reinforce=False)


def policy_datum_of_two_targets() -> Datum:
    plane = np.zeros((4, 2), np.float32)
    return with_inputs(datum(), target_tokens=plane.astype(np.int64), logprobs=plane, advantages=plane)


def nan_at_two(values: list[float]) -> list[float]:
    return [*values[:2], math.nan, *values[3:]]


@pytest.mark.parametrize(
    ("name", "example", "message"),
    [
        pytest.param("ppo", lambda: without_input(datum(), "advantages"), "needs the input advantages", id="missing"),
        pytest.param("ppo", lambda: with_inputs(datum(), mask=np.ones(4)), "not take the input mask", id="unknown"),
        pytest.param("dro", lambda: datum(clip_low_threshold=1.0), "not take the input clip_low", id="not-its-own"),
        pytest.param("ppo", lambda: with_inputs(datum(), logprobs=[1.0]), r"logprobs has shape \[1\]", id="length"),
        pytest.param("ppo", lambda: datum(logprobs=nan_at_two(Q)), "logprobs holds NaN", id="nan"),
        pytest.param("ppo", lambda: datum(advantages=math.inf), "advantages holds NaN or infinity", id="infinity"),
        pytest.param("ppo", policy_datum_of_two_targets, r"cannot have shape \[4, 2\]", id="2d-targets"),
        pytest.param("ppo", lambda: datum(clip_low_threshold=2.0), "is above clip_high_threshold", id="crossed"),
        pytest.param("gspo", lambda: datum(sequence_ratio_mask=0.0), "sequence_ratio_mask", id="empty-mask"),
        pytest.param("gspo", lambda: datum(sequence_ratio_mask=-1.0), "sequence_ratio_mask", id="negative-mask"),
        pytest.param(
            "cross_entropy",
            lambda: with_inputs(sft_datum(4, targets=2), weights=np.ones(4)),
            r"weights has shape \[4\], target_tokens has \[4, 2\]",
            id="1d-weights-of-2d-targets",
        ),
        pytest.param(
            "cross_entropy", lambda: with_inputs(sft_datum(4), target_tokens=[1, 2]), "model_input has 4", id="targets"
        ),
        pytest.param(
            "cross_entropy", lambda: with_inputs(sft_datum(4), target_tokens=7), r"cannot have shape \[\]", id="0d"
        ),
        pytest.param(
            "cross_entropy",
            lambda: with_inputs(sft_datum(4), target_tokens=[[[1]] * 4]),
            r"cannot have shape \[1, 4, 1\]",
            id="3d",
        ),
    ],
)
def test_a_bad_input_names_datum_and_key(name: str, example: Callable[[], Datum], message: str) -> None:
    good = sft_datum(4) if name == "cross_entropy" else datum()
    with pytest.raises(UserError, match=f"Datum 1: .*{message}"):
        prepare_loss(LossSpec(name), [good, example()])


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        pytest.param("ppo", {"epsilon": 0.2}, "Unknown key 'epsilon'.*clip_high_threshold, clip_low", id="unknown"),
        pytest.param("importance_sampling", {"beta": 0.2}, "it takes none", id="takes-none"),
        pytest.param("cispo", {"kl_coeff": 0.2}, "Unknown key 'kl_coeff'", id="anothers"),
        pytest.param("dro", {"beta": "0.1"}, "must be a finite number", id="text"),
        pytest.param("dro", {"beta": math.nan}, "must be a finite number", id="nan"),
        pytest.param("stable_reinforce", {"kl_coeff": -0.1}, "is -0.1.*must be 0 or more", id="negative"),
        pytest.param("ppo", {"clip_low_threshold": 1.3}, "1.3 above clip_high_threshold 1.2", id="crossed"),
    ],
)
def test_a_bad_config_names_loss_and_key(name: str, config: dict[str, float | str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        prepare_loss(LossSpec(name, config), [datum()])
