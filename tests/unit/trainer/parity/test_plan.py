"""A round of the plan has every loss, and two rounds have every kind of target."""

from __future__ import annotations

from tinsmith_trainer.engines.losses import loss_names
from tinsmith_trainer.engines.megatron.batch import is_shifted
from tinsmith_trainer.parity.plan import CALLS, CROSS_ENTROPY, TARGETS, ParityCall, plan_steps

ROUND = len(CALLS)


def calls(steps: int) -> list[ParityCall]:
    plan = plan_steps(steps=steps, rank=8, seed=0, vocab_size=512, max_length=512)
    return [call for step in plan.steps for call in step.calls]


def test_a_round_has_every_loss_that_an_engine_computes() -> None:
    assert {call.loss.name for call in calls(ROUND)} == set(loss_names(map_stable_reinforce=False))


def test_two_rounds_have_every_kind_of_target() -> None:
    datums = [datum for call in calls(2 * ROUND) if call.loss.name == CROSS_ENTROPY for datum in call.datums]
    assert {datum.loss_inputs[TARGETS].ndim for datum in datums} == {1, 2}
    assert {is_shifted(datum) for datum in datums if datum.loss_inputs[TARGETS].ndim == 1} == {True, False}
