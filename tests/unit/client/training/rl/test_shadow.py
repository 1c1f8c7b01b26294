"""A shadow never delays the run: batches that are too many are skipped."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import tinker
from support.client.simulated_training import SimulatedModel, SimulatedSampler
from tinker import types
from tinsmith.training.rl.shadow import ShadowClient

pytestmark = pytest.mark.pytorch

DATUM = types.Datum(model_input=types.ModelInput.from_ints([1]), loss_fn_inputs={})


class Held(SimulatedModel):
    """A model that computes when it is allowed to."""

    def __init__(self) -> None:
        super().__init__(SimulatedSampler(lambda prompt, seed: []))
        self.begun, self.may = asyncio.Event(), asyncio.Event()

    async def forward_backward(self, data: list[tinker.Datum], *_: Any) -> types.ForwardBackwardOutput:
        self.begun.set()
        await self.may.wait()
        return await super().forward_backward(data)


def shadow_of(model: Held, most_waiting: int) -> ShadowClient:
    adam = types.AdamParams(learning_rate=1e-3)
    return ShadowClient("shadow", model, adam, most_steps_waiting=most_waiting)  # type: ignore[arg-type]


async def test_steps_beyond_the_capacity_are_skipped_and_counted() -> None:
    model = Held()
    shadow = shadow_of(model, 2)
    assert [shadow.offer(step, [DATUM]) for step in range(4)] == [True, True, False, False]
    model.may.set()
    await shadow.finish(within_seconds=60)
    assert [step.step for step in shadow.steps] == [0, 1]
    assert shadow.offer(4, [DATUM])
    await shadow.finish(within_seconds=60)
    assert ([step.step for step in shadow.steps], shadow.missed_steps) == ([0, 1, 4], 2)


async def test_a_shadow_cancelled_during_a_step_never_uses_the_open_gradient() -> None:
    model = Held()
    shadow = shadow_of(model, 3)
    for step in (4, 5):
        shadow.offer(step, [DATUM])
    await model.begun.wait()
    await shadow.cancel()
    assert str(shadow.failure).startswith("cancelled in step 4, whose gradient may still be on the server")
    assert (shadow.offer(6, [DATUM]), shadow.missed_steps, model.steps) == (False, 3, 0)


async def test_a_shadow_cancelled_between_two_steps_continues() -> None:
    model = Held()
    model.may.set()
    shadow = shadow_of(model, 2)
    shadow.offer(0, [DATUM])
    await shadow.finish(within_seconds=60)
    await shadow.cancel()
    assert shadow.offer(1, [DATUM])
    await shadow.finish(within_seconds=60)
    assert ([step.step for step in shadow.steps], shadow.failure) == ([0, 1], None)


async def test_batches_that_do_not_finish_in_time_are_cancelled_and_missed() -> None:
    shadow = shadow_of(Held(), 2)
    shadow.offer(0, [DATUM])
    await shadow.finish(within_seconds=0)
    assert (shadow.steps, shadow.missed_steps) == ([], 1)


async def test_a_shadow_without_batches_finishes_at_once_and_needs_a_queue() -> None:
    await shadow_of(Held(), 1).finish(within_seconds=60)
    with pytest.raises(ValueError, match="it must be 1 or more"):
        shadow_of(Held(), 0)
