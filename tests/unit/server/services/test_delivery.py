"""An acknowledgement counts when the epoch under which it was given still holds, read behind it."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from tinsmith_rpc import worker_pb2
from tinsmith_server.errors import HandleClosed, WorkerUnavailable
from tinsmith_server.fleet.base import Fleet
from tinsmith_server.services.delivery import Delivery
from tinsmith_server.store.connection import StoreUnavailable
from tinsmith_server.store.store import Store


class EpochsOneByOne:
    """A store whose reads see what holds when they begin, and are answered when `answers` lets them."""

    def __init__(self) -> None:
        self.epoch = 1
        self.reads = 0
        self.broken: Exception | None = None
        self.answers = asyncio.Event()
        self.answers.set()

    async def epoch_of(self, _worker_id: str) -> int:
        self.reads += 1
        seen = self.epoch
        await self.answers.wait()
        if self.broken is not None:
            raise self.broken
        return seen


class OneWorker:
    """Fleet, handle and client at once. What is submitted is on disk when `synced` is set."""

    def __init__(self, store: EpochsOneByOne) -> None:
        self._store = store
        self.worker_id = "w1"
        self.activated = 1
        self.submitted: list[tuple[int, int]] = []
        self.synced = asyncio.Event()
        self.synced.set()

        self.closed_handles = 0

    def worker(self, _worker_id: str) -> OneWorker:
        return self

    async def connection(self, _timeout_seconds: float) -> OneWorker:
        if self.closed_handles:
            self.closed_handles -= 1
            raise HandleClosed("the connection is closed")
        return self

    async def submit(
        self, request: worker_pb2.SubmitRequest, _tenant: str, _share_weight: float | None
    ) -> worker_pb2.SubmitReply:
        epoch = self.activated
        await self.synced.wait()
        self.submitted.append((request.seq_id, epoch))
        return worker_pb2.SubmitReply(epoch=epoch)

    async def renew(self) -> None:
        self.activated = self._store.epoch


@pytest.fixture
def store() -> EpochsOneByOne:
    return EpochsOneByOne()


@pytest.fixture
def worker(store: EpochsOneByOne) -> OneWorker:
    return OneWorker(store)


async def equal_share(_tenant: str) -> None:
    """No tenant has a weight of its own."""


@pytest.fixture
def delivery(store: EpochsOneByOne, worker: OneWorker) -> Delivery:
    return Delivery(cast("Store", store), cast("Fleet", worker), equal_share)


def operation(number: int) -> Any:
    return worker_pb2.SubmitRequest(model_id="m", seq_id=number)


async def until(count: int, store: EpochsOneByOne) -> None:
    async with asyncio.timeout(10):
        while store.reads < count:
            await asyncio.sleep(0)


async def test_operations_of_one_sync_are_checked_by_one_read(
    delivery: Delivery, store: EpochsOneByOne, worker: OneWorker
) -> None:
    worker.synced.clear()
    submits = [asyncio.create_task(delivery.submit("w1", operation(number), "ada")) for number in range(32)]
    await asyncio.sleep(0)
    worker.synced.set()
    await asyncio.gather(*submits)

    assert store.reads == 1


async def test_a_read_that_has_begun_vouches_for_nothing_that_comes_later(
    delivery: Delivery, store: EpochsOneByOne, worker: OneWorker
) -> None:
    store.answers.clear()
    first = asyncio.create_task(delivery.submit("w1", operation(1), "ada"))
    await until(1, store)
    store.epoch = 2
    second = asyncio.create_task(delivery.submit("w1", operation(2), "ada"))
    await until(2, store)
    store.answers.set()
    await asyncio.gather(first, second)

    assert worker.submitted == [(1, 1), (2, 1), (2, 2)]


async def test_a_caller_that_gives_up_does_not_cancel_the_read_for_others(
    delivery: Delivery, store: EpochsOneByOne, worker: OneWorker
) -> None:
    store.answers.clear()
    impatient, patient = (asyncio.create_task(delivery.submit("w1", operation(number), "ada")) for number in (1, 2))
    await until(1, store)
    impatient.cancel()
    store.answers.set()
    await patient

    assert store.reads == 1


async def test_a_failed_read_fails_its_callers_and_not_the_next_read(delivery: Delivery, store: EpochsOneByOne) -> None:
    store.broken = StoreUnavailable("away")
    both = (delivery.submit("w1", operation(number), "ada") for number in (1, 2))
    failed = await asyncio.gather(*both, return_exceptions=True)
    store.broken = None
    await delivery.submit("w1", operation(3), "ada")

    assert [str(error) for error in failed] == ["away", "away"]
    assert store.reads == 2


async def test_a_handle_that_is_given_up_meanwhile_is_looked_up_again(delivery: Delivery, worker: OneWorker) -> None:
    worker.closed_handles = 2
    assert await delivery.submit("w1", operation(1), "ada") == 1


async def test_a_handle_that_stays_abandoned_is_reported_after_the_patience_ends(
    delivery: Delivery, worker: OneWorker
) -> None:
    worker.closed_handles = 10**6
    with pytest.raises(HandleClosed):
        await delivery.submit("w1", operation(1), "ada", patience_seconds=0)


async def test_an_epoch_that_the_store_never_confirms_ends_with_patience(
    delivery: Delivery, store: EpochsOneByOne, worker: OneWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lagging standby that serves the store's reads causes this."""

    async def renew() -> None: ...

    monkeypatch.setattr(worker, "renew", renew)
    store.epoch = 2
    with pytest.raises(WorkerUnavailable, match="database_url leads to a standby"):
        await delivery.submit("w1", operation(1), "ada", patience_seconds=0)
