"""The minibatches and steps of a stream and their times; tests/sdk/test_streams.py has their results."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import tinker
from hypothesis import given
from hypothesis import strategies as st
from rich.progress import Progress
from tinker import types
from tinsmith.training.errors import MinibatchFailed
from tinsmith.training.streams import MinibatchPlan, RolloutBuffer, RolloutGroup, StepReport, stream_minibatch_train

ADAM = types.AdamParams(learning_rate=1e-3)


@dataclass
class RecordingClient:
    """A TrainingClient that records the stream's calls in order; it answers at once unless `held`."""

    calls: list[Any] = field(default_factory=list)
    held: asyncio.Event | None = None
    refused: int | None = None
    """The first token of a refused datum."""

    def forward_backward(self, data: Sequence[types.Datum], *_: object) -> asyncio.Future[types.ForwardBackwardOutput]:
        names = [datum.model_input.to_ints()[0] for datum in data]
        self.calls.append(names)
        return asyncio.ensure_future(self._answer(names))

    async def _answer(self, names: list[int]) -> types.ForwardBackwardOutput:
        if self.held is not None:
            await self.held.wait()
        if self.refused in names:
            raise tinker.TinkerError("this loss needs advantages")
        outputs = [{"logprobs": types.TensorData(data=[float(name)], dtype="float32", shape=[1])} for name in names]
        return types.ForwardBackwardOutput(
            loss_fn_output_type="x", loss_fn_outputs=outputs, metrics={"loss:sum": float(sum(names))}
        )

    def optim_step(self, adam: types.AdamParams) -> asyncio.Future[types.OptimStepResponse]:
        self.calls.append(adam.learning_rate)
        done: asyncio.Future[types.OptimStepResponse] = asyncio.get_running_loop().create_future()
        done.set_result(types.OptimStepResponse(metrics={"grad_norm": 1.0}))
        return done


def group(*names: int, policy_step: int = 0) -> RolloutGroup:
    data = [types.Datum(model_input=types.ModelInput.from_ints([name]), loss_fn_inputs={}) for name in names]
    return RolloutGroup(data, policy_step)


async def arriving(groups: Iterable[RolloutGroup]) -> AsyncIterator[RolloutGroup]:
    for one in groups:
        yield one


async def trained(
    client: RecordingClient, groups: Iterable[RolloutGroup], plan: MinibatchPlan, **options: Any
) -> list[StepReport]:
    steps = stream_minibatch_train(cast(tinker.TrainingClient, client), arriving(groups), plan, ADAM, **options)
    return [report async for report in steps]


async def test_each_minibatch_is_sent_when_its_groups_are_there() -> None:
    client = RecordingClient()
    buffer = RolloutBuffer(1)
    plan = MinibatchPlan(groups_per_step=4, groups_per_minibatch=2)
    steps = stream_minibatch_train(cast(tinker.TrainingClient, client), buffer, plan, ADAM)
    training = asyncio.ensure_future(anext(steps))
    for name in (1, 2, 3):
        await buffer.put(group(name))
    while len(buffer):
        await asyncio.sleep(0)
    assert client.calls == [[1, 2]]
    await buffer.put(group(4))
    report = await training
    assert client.calls == [[1, 2], [3, 4], ADAM.learning_rate]
    assert (report.step, report.minibatches, report.metrics) == (0, 2, {"loss:sum": 10.0, "grad_norm": 1.0})
    assert [output["logprobs"].data for output in report.outputs] == [[1.0], [2.0], [3.0], [4.0]]


async def test_no_more_minibatches_are_under_way_than_the_plan_says() -> None:
    client = RecordingClient(held=asyncio.Event())
    plan = MinibatchPlan(groups_per_step=4, groups_per_minibatch=1, minibatches_in_flight=2)
    training = asyncio.ensure_future(trained(client, map(group, range(4)), plan))
    for _ in range(20):
        await asyncio.sleep(0)
    assert client.calls == [[0], [1]]
    assert client.held is not None
    client.held.set()
    await training
    assert client.calls == [[0], [1], [2], [3], ADAM.learning_rate]


async def test_rollouts_that_are_too_old_are_counted_and_not_trained_on() -> None:
    client = RecordingClient()
    plan = MinibatchPlan(groups_per_step=1, groups_per_minibatch=1, most_stale_steps=1)
    groups = [group(1), group(2), group(3), group(4, policy_step=1), group(5, policy_step=3)]
    reports = await trained(client, groups, plan)
    assert client.calls[::2] == [[1], [2], [4], [5]]
    assert [(report.staleness, report.dropped_groups) for report in reports] == [([0], 0), ([1], 0), ([1], 1), ([0], 0)]


async def test_a_failed_minibatch_is_no_step() -> None:
    client = RecordingClient(refused=3)
    with pytest.raises(MinibatchFailed, match=r"minibatch 1 of step 7: this loss needs advantages; .*load the last"):
        await trained(client, [group(1), group(3, policy_step=7)], MinibatchPlan(2, 1, 7), first_step=7)
    assert client.calls == [[1], [3]]


@pytest.mark.parametrize(
    "numbers",
    [(0, 1), (1, 0), (1, 2), (1, 1, -1), (1, 1, 0, 0)],
    ids=["step", "minibatch", "larger", "stale", "flight"],
)
def test_a_plan_that_cannot_be_is_refused(numbers: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"it must be|make it smaller|must be 0"):
        MinibatchPlan(*numbers)


@given(
    sizes=st.lists(st.integers(0, 3), max_size=12),
    per_step=st.integers(1, 5),
    per_minibatch=st.integers(1, 5),
    in_flight=st.integers(1, 3),
)
async def test_every_datum_trains_once_and_in_order(
    sizes: list[int], per_step: int, per_minibatch: int, in_flight: int
) -> None:
    names = iter(range(1000))
    groups = [group(*(next(names) for _ in range(size))) for size in sizes]
    plan = MinibatchPlan(per_step, min(per_step, per_minibatch), len(sizes), in_flight)
    client = RecordingClient()
    reports = await trained(client, groups, plan)
    sent = [name for call in client.calls if isinstance(call, list) for name in call]
    assert sent == list(range(sum(sizes)))
    assert [datum.model_input.to_ints()[0] for report in reports for datum in report.data] == sent
    assert client.calls.count(ADAM.learning_rate) == len(reports)


async def test_the_progress_bar_shows_the_groups_of_the_step_and_dropped_groups() -> None:
    with Progress(disable=True) as progress:
        groups = [group(1), group(2), group(3, policy_step=1)]
        await trained(RecordingClient(), groups, MinibatchPlan(2, 1, 1), progress=progress)
        [task] = progress.tasks
    assert (task.completed, task.total) == (1, 2)
    assert task.description == "step 1, up to 0 behind, 0 dropped"


async def test_a_group_of_weights_from_a_later_step_is_refused() -> None:
    with pytest.raises(ValueError, match="policy_step 1, but only 0 steps were made"):
        await trained(RecordingClient(), [group(1, policy_step=1)], MinibatchPlan(1, 1))
