from __future__ import annotations

from dataclasses import astuple
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tinsmith_trainer.engines.batching import check_tokens
from tinsmith_trainer.engines.losses import loss_names, prepare_loss
from tinsmith_trainer.engines.megatron.batch import is_shifted
from tinsmith_trainer.parity.plan import Plan, around, plan_steps


def plan(steps: int = 6, seed: int = 0, vocab_size: int = 512, max_length: int = 512) -> Plan:
    return plan_steps(steps=steps, rank=8, seed=seed, vocab_size=vocab_size, max_length=max_length)


def test_three_steps_have_every_loss_that_an_engine_computes() -> None:
    seen = {call.loss.name for step in plan(3).steps for call in step.calls}
    assert seen == set(loss_names(map_stable_reinforce=False))


def test_every_step_has_two_calls_that_add_up_and_neighbours_share_no_parameters() -> None:
    steps = plan(12).steps
    assert {len(step.calls) for step in steps} == {2}
    for one, other in pairwise(steps):
        assert one.adam.learning_rate != other.adam.learning_rate
        assert one.adam != other.adam
    assert {step.adam.grad_clip_norm > 0 for step in steps} == {True, False}


def test_targets_are_shifted_in_some_calls_and_several_per_position_in_others() -> None:
    calls = [call for step in plan(6).steps for call in step.calls]
    shifted = [all(is_shifted(datum) for datum in call.datums) for call in calls]
    assert {True, False} <= set(shifted)
    assert any(datum.loss_inputs["target_tokens"].ndim == 2 for call in calls for datum in call.datums)


def test_calls_are_ragged_and_of_odd_and_even_counts() -> None:
    calls = [call for step in plan(6).steps for call in step.calls]
    assert all(len({datum.length for datum in call.datums}) > 1 for call in calls)
    assert {len(call.datums) % 2 for call in calls} == {0, 1}


@given(st.integers(0, 99), st.integers(2, 600), st.integers(1, 100))
def test_every_call_is_one_that_engines_take(seed: int, vocab_size: int, max_length: int) -> None:
    for step in plan(3, seed, vocab_size, max_length).steps:
        for call in step.calls:
            check_tokens(call.datums, vocab_size=vocab_size, max_length=max_length)
            prepare_loss(call.loss, call.datums)


def drawn(seed: int) -> str:
    return repr([astuple(call) for step in plan(seed=seed).steps for call in step.calls])


def test_a_seed_draws_the_same_data_each_time_and_another_seed_other_data() -> None:
    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)


def test_sampler_logprobs_are_scattered_around_those_given_and_nothing_else_moves() -> None:
    call = plan().steps[1].calls[0]
    moved = around(call, [np.full(datum.length, -6.0, np.float32) for datum in call.datums])
    for before, after in zip(call.datums, moved.datums, strict=True):
        np.testing.assert_allclose(after.loss_inputs["logprobs"], before.loss_inputs["logprobs"] - 6.0)
        assert after.loss_inputs["advantages"] is before.loss_inputs["advantages"]


def test_cross_entropy_has_no_sampler_and_stays_as_it_is() -> None:
    call = plan().steps[0].calls[0]
    assert around(call, [np.zeros(0, np.float32) for _ in call.datums]) is call
    assert "logprobs" not in call.datums[0].loss_inputs


@pytest.mark.parametrize("steps", [1, 7])
def test_there_are_as_many_steps_as_were_asked_for(steps: int) -> None:
    assert len(plan(steps).steps) == steps
