"""The promises of every fleet, wherever its workers run."""

from __future__ import annotations

import asyncio

import pytest
from support.server.fleet_under_test import START_SECONDS, Installation
from support.server.operator_stand_in import MODEL
from tinsmith_rpc import worker_pb2
from tinsmith_server.errors import WorkerAbsent, WorkerUnavailable

CREATION = worker_pb2.SubmitRequest(model_id="m", kind=worker_pb2.CREATE_MODEL)


async def test_a_worker_answers_under_the_epoch_that_the_store_gave_it(installation: Installation) -> None:
    worker = installation.worker()
    first, second = await asyncio.gather(worker.connection(START_SECONDS), worker.connection(START_SECONDS))
    assert first is second is worker.running()
    row = await installation.store.get_worker(worker.worker_id)
    description = await first.describe()
    assert (description.epoch, description.instance_id) == (row.epoch, row.instance_id) == (1, row.instance_id)


async def test_a_killed_worker_comes_back_under_a_new_epoch(installation: Installation) -> None:
    worker = installation.worker()
    before = await worker.connection(START_SECONDS)
    await installation.kill()
    while (after := await worker.connection(START_SECONDS)) is before:
        await asyncio.sleep(0.01)
    assert (await after.submit(CREATION, "ada")).epoch == 2
    assert (await installation.store.get_worker(worker.worker_id)).epoch == 2
    with pytest.raises(WorkerUnavailable):
        await before.describe()


async def test_a_worker_fenced_out_is_taken_back_by_renewing(installation: Installation) -> None:
    worker = installation.worker()
    client = await worker.connection(START_SECONDS)
    row = await installation.store.get_worker(worker.worker_id)
    assert await installation.store.raise_epoch(worker.worker_id, row.epoch, row.instance_id)
    await worker.renew()
    assert (await client.submit(CREATION, "ada")).epoch == 2


async def test_one_worker_trains_and_samples_the_served_model(installation: Installation) -> None:
    fleet, worker = installation.fleet, installation.worker()
    await worker.connection(START_SECONDS)
    assert fleet.model(MODEL) in fleet.models
    assert worker.base_model == MODEL
    assert list(fleet.trainers(MODEL, rank=8)) == list(fleet.samplers(MODEL)) == [worker]
    assert fleet.worker(worker.worker_id) is worker
    assert fleet.problem is None


async def test_a_model_that_is_not_served_has_no_workers_and_a_message_with_the_remedy(
    installation: Installation,
) -> None:
    fleet = installation.fleet
    assert fleet.model("org/none") is None
    assert list(fleet.trainers("org/none", rank=8)) == list(fleet.samplers("org/none")) == []
    assert "org/none" in await fleet.provide("org/none", rank=8)


async def test_a_worker_that_is_not_there_is_absent_with_the_cure(installation: Installation) -> None:
    with pytest.raises(WorkerAbsent, match=installation.cure_of_absence):
        installation.fleet.worker("gone-1")


async def test_a_worker_that_may_return_is_not_permanently_lost(installation: Installation) -> None:
    worker = installation.worker()
    await worker.connection(START_SECONDS)
    for worker_id in (worker.worker_id, "gone-1"):
        assert await installation.fleet.permanently_lost_reason(await installation.store.get_worker(worker_id)) is None


async def test_a_closed_fleet_calls_no_worker(installation: Installation) -> None:
    client = await installation.worker().connection(START_SECONDS)
    await installation.fleet.close()
    with pytest.raises(WorkerUnavailable):
        await client.describe()
