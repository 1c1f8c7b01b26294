"""Operations run once, in order, whatever clients and networks do."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from support.worker.in_process import Worker
from support.worker.messages import with_a_later_field
from support.worker.process import MODEL, Call, broken_train, create, save, step, train
from tinsmith_rpc import worker_pb2
from tinsmith_trainer.oplog.model_queues import GAP_CLOSES_AFTER_SECONDS
from tinsmith_trainer.worker import admission

from .conftest import StartWorker


async def optimizer_step(worker: Worker) -> int:
    return worker.engine.state(MODEL).optimizer_step


@pytest.mark.core("durability 1")
async def test_trap_6_a_repeated_submit_runs_once(worker: Worker) -> None:
    await worker.submit(create(), train(1), step(2))
    for _ in range(3):
        await worker.submit(train(1), step(2))
    await worker.finished(2)
    assert await optimizer_step(worker) == 1


async def test_trap_6_two_copies_at_the_same_moment_run_once(worker: Worker) -> None:
    await worker.submit(create())
    await asyncio.gather(*(worker.submit(train(1), step(2)) for _ in range(8)))
    await worker.finished(2)
    assert await optimizer_step(worker) == 1


@pytest.mark.core("durability 1")
async def test_trap_2_the_first_chunk_may_come_last(worker: Worker) -> None:
    await worker.submit(create(), train(2), train(3))
    assert await worker.is_pending(2)
    await worker.submit(train(1))
    for seq_id in (1, 2, 3):
        assert (await worker.finished(seq_id)).failure is None


@pytest.mark.core("durability 4")
async def test_trap_7_a_missing_gradient_fails_the_step_and_the_next_round_works(worker: Worker) -> None:
    await worker.submit(create(), train(2), step(3), train(4), step(5))
    assert "operation 1 of this model never arrived" in await worker.failure(3)
    assert (await worker.finished(5)).failure is None
    assert await optimizer_step(worker) == 1


async def test_an_operation_of_a_later_release_fails_in_order_and_its_successors_run(worker: Worker) -> None:
    asked = with_a_later_field(worker_pb2.OptimStep.FromString(step(2).payload), 126)
    await worker.submit(create(), train(1), replace(step(2), payload=asked.SerializeToString()), train(3), step(4))
    assert (await worker.failure(2)).startswith("server: This worker's release does not know field 126 of OptimStep")
    assert (await worker.finished(4)).failure is None
    assert await optimizer_step(worker) == 1


async def test_an_unreadable_payload_fails_in_order_and_its_successors_run(worker: Worker) -> None:
    await worker.submit(create(), train(1), replace(step(2), payload=b"\xff"), train(3), step(4))
    assert "DecodeError" in await worker.failure(2)
    assert (await worker.finished(4)).failure is None


@pytest.mark.core("durability 3")
async def test_a_gap_below_a_forward_backward_closes_after_its_time(worker: Worker) -> None:
    await worker.submit(create(), train(2))
    await worker.finished(0)
    worker.service.queues.age_gaps(0)  # the gap is noticed
    worker.service.queues.age_gaps(GAP_CLOSES_AFTER_SECONDS - 1)
    assert await worker.is_pending(2)
    worker.service.queues.age_gaps(1)
    assert (await worker.finished(2)).failure is None


@pytest.mark.core("durability 3")
async def test_a_number_that_was_written_off_fails_and_never_runs(worker: Worker) -> None:
    await worker.submit(create(), train(2), step(3))
    await worker.finished(3)
    await worker.submit(train(1))
    assert "came too late" in await worker.failure(1)
    await worker.submit(step(4))
    assert (await worker.finished(4)).failure is None, "the late number is not a gradient of the next window"


async def test_a_gap_that_closed_stays_closed_after_a_restart(start: StartWorker) -> None:
    worker = await start()
    await worker.submit(create(), train(2))
    await worker.finished(0)
    worker.service.queues.age_gaps(0)
    worker.service.queues.age_gaps(GAP_CLOSES_AFTER_SECONDS)
    await worker.finished(2)
    successor = await start()
    await successor.submit(train(1))
    assert "came too late" in await successor.failure(1)


async def test_a_failed_gradient_survives_a_restart_as_a_failure(start: StartWorker) -> None:
    worker = await start()
    await worker.submit(create(), broken_train(1), train(2))
    await worker.finished(2)
    successor = await start()
    await successor.submit(step(3))
    assert "forward_backward 1 failed" in await successor.failure(3)


async def test_a_failed_forward_does_not_spoil_the_step(worker: Worker) -> None:
    forward = train(2, (1, 99), forward_only=True)  # 99 is no token of the model
    await worker.submit(create(), train(1), forward, step(3))
    assert "ids outside" in await worker.failure(2)
    assert (await worker.finished(3)).failure is None


async def test_an_operation_the_server_rejected_fails_in_its_place(worker: Worker) -> None:
    await worker.submit(create())
    await worker.submit(train(1), rejection="the body is too large")
    await worker.submit(step(2))
    assert await worker.failure(1) == "user: the body is too large"
    assert "the body is too large" in await worker.failure(2)


async def test_models_do_not_wait_for_each_other(worker: Worker) -> None:
    other = "sess:train:1"
    await worker.submit(create(), train(2), create(model_id=other))
    await worker.submit(Call(1, worker_pb2.OPTIM_STEP, step(1).payload, other))
    assert (await worker.finished(1, other)).failure is None
    assert await worker.is_pending(2)


@pytest.mark.core("durability 2")
async def test_a_backlog_delays_the_acknowledgement_and_refuses_nothing(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "BACKLOG_OPERATIONS", 3)
    monkeypatch.setattr(admission, "BACKLOG_DELAY_SECONDS", 0.2)
    await worker.submit(create(), train(2), train(3), train(4))  # held up by 1, which is in no backlog
    held_back = asyncio.create_task(worker.submit(train(5)))
    await asyncio.sleep(0.05)
    assert not held_back.done()
    await held_back
    await worker.submit(train(1))
    assert (await worker.finished(5)).failure is None


async def test_a_seed_that_was_not_given_is_drawn_once(start: StartWorker) -> None:
    lora = worker_pb2.LoraConfig(rank=4, alpha=32.0, train_attn=True)
    worker = await start()
    await worker.submit(Call(0, worker_pb2.CREATE_MODEL, worker_pb2.CreateModel(lora=lora).SerializeToString()))
    await worker.finished(0)
    before = worker.engine.state(MODEL)
    successor = await start()
    await successor.recovered()
    assert successor.engine.state(MODEL).lora == before.lora


@pytest.mark.parametrize("kind", [worker_pb2.TRAINING, worker_pb2.SAMPLER, worker_pb2.EXTERNAL])
async def test_a_taken_name_is_refused_with_the_remedy_for_its_kind_of_save(
    worker: Worker, kind: worker_pb2.CheckpointKind
) -> None:
    """In the SDK, `save_state` alone has `overwrite`."""
    request = worker_pb2.SaveWeights(kind=kind, name="a").SerializeToString()
    await worker.submit(create(), *(Call(number, worker_pb2.SAVE_WEIGHTS, request) for number in (1, 2)))
    refused = await worker.failure(2)
    assert "exists already. Choose another name" in refused
    assert ("overwrite" in refused) == (kind == worker_pb2.TRAINING)


async def test_saves_of_one_name_are_distinguished_by_the_saves_in_the_store(worker: Worker) -> None:
    await worker.submit(create(), save(1, "a"), save(2, "a"), save(3, "a", overwrite=True))
    assert (await worker.finished(1)).failure is None
    assert "exists already" in await worker.failure(2)
    assert (await worker.finished(3)).failure is None
