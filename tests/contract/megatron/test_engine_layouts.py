"""However ranks divide a model and its data, the engine trains what the PEFT engine trains."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray
from support.engine.contract import (
    CROSS_ENTROPY,
    IMPORTANCE_SAMPLING,
    bits,
    compute_together,
    forward_backward,
    group,
    spec,
    state_bits,
    train,
)
from support.engine.datums import policy_datum, sft_datum
from support.nemo_rl.engines import engine_over
from support.nemo_rl.gloo_group import GlooGroup
from support.tiny_models import tiny_model
from tinsmith_trainer.engines.base import AdamParams, AdapterState, Engine, LoraSpec, Outcome, Work
from tinsmith_trainer.engines.megatron.flags import MegatronSettings, RankRecompute
from tinsmith_trainer.engines.megatron.local_rank import RankModel
from tinsmith_trainer.engines.megatron.parallelism import Parallelism
from tinsmith_trainer.engines.peft import PeftEngineSettings, build_peft_engine
from tinsmith_trainer.errors import ServerError

MAX_RANK = 8
SETTINGS = MegatronSettings(max_rank=MAX_RANK, token_budget=64)
FAST = replace(SETTINGS, numerics="fast", token_budget=256)
RECOMPUTED = ("pipeline-2",)
"""Layouts whose layers are computed again in backward, which changes no bit."""
LAYOUTS = {
    "data-2": Parallelism(2),
    "data-2-distributed-optimizer": Parallelism(2, distributed_optimizer=True),
    "tensor-2": Parallelism(2, tensor=2),
    "pipeline-2": Parallelism(2, pipeline=2),
    "tensor-2-data-2": Parallelism(4, tensor=2, distributed_optimizer=True),
}
SFT = [sft_datum(length, seed) for seed, length in enumerate((5, 20, 12, 33, 7))]
POLICY = [policy_datum(length, seed) for seed, length in enumerate((7, 19, 4))]
STEPS = (
    AdamParams(learning_rate=1e-3, eps=1e-3),
    AdamParams(learning_rate=2e-3, beta1=0.5, beta2=0.99, eps=1e-3, weight_decay=0.1, grad_clip_norm=0.5),
    AdamParams(learning_rate=1e-3, eps=1e-3, grad_clip_norm=1e6),
)
ONLY_ATTENTION = LoraSpec(rank=3, alpha=16.0, seed=5, train_mlp=False, train_unembed=False)


class Sides(NamedTuple):
    ranks: GlooGroup
    engine: Engine
    peft: Engine


@pytest.fixture(params=list(LAYOUTS), scope="module")
def ranks(request: pytest.FixtureRequest) -> Iterator[GlooGroup]:
    recompute: RankRecompute = "layers" if request.param in RECOMPUTED else "none"
    ranks = GlooGroup(RankModel(tiny_model().directory, LAYOUTS[request.param], MAX_RANK, recompute))
    yield ranks
    ranks.close()


@pytest.fixture
def sides(ranks: GlooGroup) -> Iterator[Sides]:
    """Each with adapters `a` and `b`, of another rank and other modules."""
    engine = engine_over(ranks, tiny_model(), SETTINGS)
    sides = Sides(ranks, engine, build_peft_engine(tiny_model(), PeftEngineSettings(max_rank=MAX_RANK)))
    for each in (sides.engine, sides.peft):
        each.create_adapter("a", spec(each))
        each.create_adapter("b", ONLY_ATTENTION)
    yield sides
    engine.drop("a")
    engine.drop("b")


def run_steps(engine: Engine) -> list[Mapping[str, float]]:
    """Two adapters in turn, each with an accumulation open while the other one computes."""
    told: list[Mapping[str, float]] = []
    for params in STEPS:
        told += [forward_backward(engine, SFT, adapter=adapter).metrics for adapter in ("a", "b")]
        for adapter in ("a", "b"):
            told.append(forward_backward(engine, POLICY, adapter=adapter, loss=IMPORTANCE_SAMPLING).metrics)
            told.append(engine.optim_step(adapter, params))
    return told


def assert_close(mine: AdapterState, reference: AdapterState) -> None:
    assert (mine.lora, mine.optimizer_step) == (reference.lora, reference.optimizer_step)
    assert mine.tensors.keys() == reference.tensors.keys()
    for name, values in mine.tensors.items():
        np.testing.assert_allclose(values, reference.tensors[name], rtol=1e-3, atol=1e-4, err_msg=name)


def test_several_adapters_train_as_on_the_peft_engine(sides: Sides) -> None:
    measured, reference = run_steps(sides.engine), run_steps(sides.peft)

    for mine, other in zip(measured, reference, strict=True):
        assert dict(mine) == pytest.approx(dict(other), rel=1e-3, abs=1e-3)
    for adapter in ("a", "b"):
        assert_close(sides.engine.state(adapter), sides.peft.state(adapter))


def test_a_checkpoint_of_either_engine_continues_on_the_other(sides: Sides) -> None:
    run_steps(sides.engine)
    forward_backward(sides.engine, SFT)

    sides.peft.load_state("moved", sides.engine.state("a"), with_optimizer=True)
    sides.engine.load_state("b", sides.peft.state("moved"), with_optimizer=True)
    assert state_bits(sides.engine.state("b")) == state_bits(sides.engine.state("a"))

    for engine, adapter in ((sides.engine, "a"), (sides.peft, "moved")):
        forward_backward(engine, SFT, adapter=adapter)
        engine.optim_step(adapter, STEPS[0])
    assert_close(sides.engine.state("a"), sides.peft.state("moved"))


def test_company_of_another_adapter_changes_no_bit(sides: Sides) -> None:
    engine = sides.engine
    run_steps(engine)
    alone = forward_backward(engine, SFT)
    gradients = {name: values.copy() for name, values in group(engine.state("a"), "gradients").items()}
    engine.clear_gradients("a")

    _, outcome = compute_together(engine, [Work("b", POLICY, IMPORTANCE_SAMPLING), Work("a", SFT, CROSS_ENTROPY)])

    assert bits(outcome) == bits(alone)
    for name, values in group(engine.state("a"), "gradients").items():
        assert np.array_equal(values, gradients[name]), name


SHARED = [Work("a", SFT, CROSS_ENTROPY), Work("b", POLICY, IMPORTANCE_SAMPLING), Work("a", POLICY, IMPORTANCE_SAMPLING)]


@pytest.fixture
def fast(ranks: GlooGroup) -> Iterator[Engine]:
    """Return an engine on the same ranks that shares forwards, with two trained adapters."""
    engine = engine_over(ranks, tiny_model(), FAST)
    engine.create_adapter("a", spec(engine))
    engine.create_adapter("b", ONLY_ATTENTION)
    for adapter in ("a", "b"):
        train(engine, SFT, adapter=adapter)
    yield engine
    engine.drop("a")
    engine.drop("b")


@pytest.fixture
def exact(ranks: GlooGroup, fast: Engine) -> Engine:
    """Return an engine that computes separate calls on the same ranks, and with the same adapters."""
    engine = engine_over(ranks, tiny_model(), SETTINGS)
    for adapter in ("a", "b"):
        engine.load_state(adapter, fast.state(adapter), with_optimizer=True)
    return engine


def results(engine: Engine, outcomes: Sequence[Outcome]) -> dict[str, NDArray[np.float32]]:
    """Return what the calls answered and accumulated, and clear the accumulators."""
    found = {}
    for number, outcome in enumerate(outcomes):
        found |= {f"{number}/{name}": np.float32(value) for name, value in outcome.metrics.items()}
        found |= {f"{number}/{row}": output["logprobs"] for row, output in enumerate(outcome.outputs)}
    for adapter in ("a", "b"):
        found |= {f"{adapter}/{name}": values for name, values in engine.state(adapter).tensors.items()}
        engine.clear_gradients(adapter)
    return found


def assert_rounded(found: Mapping[str, NDArray[np.float32]], expected: Mapping[str, NDArray[np.float32]]) -> None:
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        atol = 1e-5 * max(1.0, float(np.abs(values).max()))
        np.testing.assert_allclose(found[name], values, rtol=0, atol=atol, err_msg=name)


@pytest.mark.parametrize("forward_only", [False, True], ids=["backward", "forward"])
def test_calls_of_several_adapters_in_one_forward_differ_from_separate_calls_by_rounding(
    fast: Engine, exact: Engine, forward_only: bool
) -> None:
    """The separate calls are padded rows. The shared ones are packed, except on tensor ranks."""
    works = [replace(work, forward_only=forward_only) for work in SHARED]
    alone = results(exact, [compute_together(exact, [work])[0] for work in works])

    calls = [fast.start(work) for work in works]
    assert fast.cobatch(calls) == calls
    fast.advance(calls)
    assert_rounded(results(fast, [fast.finish(call) for call in calls]), alone)


def test_packed_datums_differ_from_rows_by_rounding(fast: Engine, exact: Engine) -> None:
    for work in SHARED:
        padded = results(exact, compute_together(exact, [work]))
        assert_rounded(results(fast, compute_together(fast, [work])), padded)


@pytest.mark.parametrize("ranks", ["data-2"], indirect=True)
def test_a_dropped_call_of_a_shared_forward_adds_no_gradient(fast: Engine) -> None:
    alone = results(fast, [compute_together(fast, [work])[0] for work in SHARED[:1]])
    calls = [fast.start(work) for work in SHARED]
    fast.advance(calls)
    kept = calls[0]
    del calls
    assert_rounded(results(fast, [fast.finish(kept)]), alone)


@pytest.mark.parametrize("ranks", ["data-2"], indirect=True)
def test_a_call_with_several_targets_per_token_and_a_call_without_backward_share_no_forward(fast: Engine) -> None:
    first, *others = [
        fast.start(SHARED[0]),
        fast.start(replace(SHARED[1], forward_only=True)),
        fast.start(Work("b", [sft_datum(5, targets=3)], CROSS_ENTROPY)),
    ]
    assert fast.cobatch([first, *others]) == [first]
    assert fast.cobatch_room(others[1]) == 0


def test_a_snapshot_with_open_gradients_continues_exactly(sides: Sides) -> None:
    run_steps(sides.engine)
    forward_backward(sides.engine, SFT)
    snapshot = sides.engine.state("a")

    went_on = go_on(sides.engine)
    sides.engine.drop("a")
    sides.engine.load_state("a", snapshot, with_optimizer=True)
    assert state_bits(sides.engine.state("a")) == state_bits(snapshot)
    assert go_on(sides.engine) == went_on


def go_on(engine: Engine) -> object:
    """Every bit of what a further call and the step answer, and of what they leave behind."""
    outcome = forward_backward(engine, POLICY, loss=IMPORTANCE_SAMPLING)
    logprobs = [output["logprobs"].tobytes() for output in outcome.outputs]
    return logprobs, outcome.metrics, engine.optim_step("a", STEPS[1]), state_bits(engine.state("a"))


# Where stages wait for each other, a failure is one of some ranks only, and costs the worker's process.
@pytest.mark.parametrize("ranks", [name for name, one in LAYOUTS.items() if one.pipeline == 1], indirect=True)
def test_a_call_that_fails_in_a_microbatch_leaves_no_trace(sides: Sides) -> None:
    run_steps(sides.engine)
    forward_backward(sides.engine, SFT[:1])
    before = {adapter: state_bits(sides.engine.state(adapter)) for adapter in ("a", "b")}

    sides.ranks.fail_in_the_second_microbatch()
    with pytest.raises(ServerError, match="the model is unchanged: RuntimeError: a microbatch failed"):
        forward_backward(sides.engine, SFT * 4)

    assert {adapter: state_bits(sides.engine.state(adapter)) for adapter in ("a", "b")} == before
    assert forward_backward(sides.engine, SFT * 4).trained_tokens == 4 * sum(datum.length for datum in SFT)


@pytest.mark.parametrize("ranks", [name for name, one in LAYOUTS.items() if one.pipeline == 1], indirect=True)
def test_after_a_failed_shared_forward_each_call_is_computed_alone(ranks: GlooGroup, fast: Engine) -> None:
    alone = results(fast, [compute_together(fast, [work])[0] for work in SHARED])
    ranks.fail_in_the_second_microbatch()
    assert_rounded(results(fast, compute_together(fast, SHARED)), alone)


def test_a_state_of_more_rank_than_the_model_has_room_for_is_refused(sides: Sides) -> None:
    state = sides.engine.state("a")
    wide = replace(state.lora, rank=MAX_RANK + 1)
    with pytest.raises(ServerError, match=f"max_rank was lowered .* Set it to at least {MAX_RANK + 1}"):
        sides.engine.load_state("b", replace(state, lora=wide), with_optimizer=True)
    assert len(group(sides.engine.state("b"), "weights")) == 2 * 4 * 2
