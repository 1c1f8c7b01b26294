"""Each optimizer step is reported once, with the figures of the gradients that it used."""

from __future__ import annotations

import asyncio
import math

import pytest
from support.worker.in_process import Worker
from support.worker.messages import datum, forward_backward, next_token_datum
from support.worker.process import MODEL, Call, broken_train, create, step, train
from tinsmith_rpc import wire_pb2, worker_pb2

from .conftest import StartWorker

TOKENS = (3, 1, 4, 1, 5)


async def steps(worker: Worker, after: int = 0) -> list[worker_pb2.StepDone]:
    return [event.step_done for event in await worker.events(after) if event.HasField("step_done")]


async def loss_sum(worker: Worker, seq_id: int) -> float:
    """Return the sum of a call's loss as its client reads it."""
    payload = (await worker.finished(seq_id)).payload or b""
    return wire_pb2.ForwardBackwardOutput.FromString(payload).metrics["loss:sum"]


def reinforce(seq_id: int, sampled: float) -> Call:
    inputs = {"target_tokens": [1, 4], "logprobs": [sampled, sampled], "advantages": [1.0, 0.0]}
    body = forward_backward([datum([3, 1], inputs)], seq_id=seq_id, loss_fn="importance_sampling")
    return Call(seq_id, worker_pb2.FORWARD_BACKWARD, body)


async def test_a_step_has_the_sums_of_the_calls_before_it_and_not_those_of_the_step_before(worker: Worker) -> None:
    await worker.submit(create(), train(1), train(2, (2, 7)), train(3, forward_only=True), step(4), train(5), step(6))
    await worker.finished(6)
    first, second = await steps(worker)
    assert (first.model_id, first.position, first.step, first.tokens) == (MODEL, 4, 1, 5)
    assert first.loss == pytest.approx((await loss_sum(worker, 1) + await loss_sum(worker, 2)) / 5)
    assert (second.position, second.step, second.tokens) == (6, 2, 4)
    assert second.loss == pytest.approx(await loss_sum(worker, 5) / 4)
    assert (first.learning_rate, first.grad_norm > 0, first.seconds > 0) == (0.01, True, True)
    assert math.isnan(first.sampler_gap)


async def test_the_mean_loss_counts_only_targets_with_a_weight(worker: Worker) -> None:
    unweighted = next_token_datum(TOKENS, weight=0.0)
    body = forward_backward([next_token_datum(TOKENS), unweighted])
    await worker.submit(create(), Call(1, worker_pb2.FORWARD_BACKWARD, body), step(2), step(3))
    await worker.finished(3)
    weighted, empty = await steps(worker)
    assert (weighted.tokens, weighted.loss) == (8, pytest.approx(await loss_sum(worker, 1) / 4))
    assert (empty.tokens, math.isnan(empty.loss), empty.step) == (0, True, 2)


async def test_the_gap_to_the_sampler_is_the_mean_over_tokens_with_an_advantage(worker: Worker) -> None:
    await worker.submit(create(), reinforce(1, sampled=-1.0), reinforce(2, sampled=-3.0), step(3))
    await worker.finished(3)
    [one] = await steps(worker)
    payload = (await worker.finished(1)).payload or b""
    output = wire_pb2.ForwardBackwardOutput.FromString(payload).loss_fn_outputs[0].fields["logprobs"]
    [drawn, _] = memoryview(output.data).cast("f")
    assert one.sampler_gap == pytest.approx((abs(drawn + 1) + abs(drawn + 3)) / 2, rel=1e-4)


async def test_a_model_that_cannot_be_created_is_reported_once_with_its_failure(start: StartWorker) -> None:
    worker = await start(max_rank=2)
    await worker.submit(create())
    failure = (await worker.finished(0)).failure
    assert failure is not None
    [failed] = [event.model_failed for event in await worker.events() if event.HasField("model_failed")]
    assert (failed.model_id, failed.failure.message, failed.failure.category) == (
        MODEL,
        failure.message,
        worker_pb2.USER,
    )
    successor = await start(max_rank=2)
    assert len([event for event in await successor.events() if event.HasField("model_failed")]) == 1


async def test_calls_for_events_end_when_the_worker_stops_and_after_it_has_stopped(worker: Worker) -> None:
    await worker.submit(create(), train(1), step(2))
    await worker.finished(2)
    last = (await worker.events())[-1].event_id
    held = asyncio.create_task(worker.service.events(last, 600))
    await asyncio.sleep(0)
    await worker.service.drain()
    async with asyncio.timeout(30):
        assert await held == []
        assert await worker.service.events(last, 600) == []


async def test_a_failed_step_is_not_reported_and_the_next_one_does_not_count_its_gradients(worker: Worker) -> None:
    await worker.submit(create(), train(1), broken_train(2), step(3), train(4, (2, 7)), step(5))
    await worker.finished(5)
    [one] = await steps(worker)
    assert (one.position, one.step, one.tokens) == (5, 1, 1)


async def test_a_restart_between_a_gradient_and_its_step_changes_no_figure_and_reports_no_step_again(
    start: StartWorker,
) -> None:
    worker = await start()
    await worker.submit(create(), train(1), step(2), train(3), train(4, (2, 7)))
    await worker.finished(4)
    before = await steps(worker)
    successor = await start()
    await successor.submit(train(5), step(6))
    await successor.finished(6)
    first, second = await steps(successor)
    assert [first] == before
    assert (second.position, second.step, second.tokens) == (6, 2, 9)
    losses = [await loss_sum(successor, number) for number in (3, 4, 5)]
    assert second.loss == pytest.approx(sum(losses) / 9)
