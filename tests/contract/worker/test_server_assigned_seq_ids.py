"""Operations that come without a number get one where they are accepted: in order, without gaps, once for each key."""

from __future__ import annotations

import asyncio

import pytest
from support.worker.in_process import Worker
from support.worker.process import MODEL, create, step, train
from tinsmith_rpc import RELEASE_SEQ_ID
from tinsmith_trainer.errors import JournalFull
from tinsmith_trainer.oplog import tidying
from tinsmith_trainer.oplog.server_assigned_seq_ids import REMEMBERED_KEYS, AssignedSeqIds, NumbersMixed

from .conftest import StartWorker
from .test_life import release

TRAIN, STEP = train(0), step(0)


async def test_a_repeated_key_gets_the_same_number_and_runs_once(worker: Worker) -> None:
    await worker.submit(create())
    numbers = await asyncio.gather(*(worker.submit_without_number(TRAIN, "a") for _ in range(8)))
    assert set(numbers) == {1}
    first = await worker.finished(1)
    assert await worker.submit_without_number(train(0, (9, 9, 9)), "a") == 1
    assert await worker.finished(1) == first
    assert await worker.submit_without_number(STEP, "b") == 2


async def test_many_at_once_get_each_its_own(worker: Worker) -> None:
    await worker.submit(create())
    numbers = await asyncio.gather(*(worker.submit_without_number(TRAIN, f"{key}") for key in range(20)))
    assert sorted(numbers) == list(range(1, 21))
    assert (await worker.finished(20)).failure is None


async def test_keys_and_numbers_outlive_the_process(start: StartWorker) -> None:
    worker = await start()
    await worker.submit(create())
    for key in "abc":
        await worker.submit_without_number(TRAIN, key)
    expected = await worker.finished(2)
    successor = await start()
    assert await successor.submit_without_number(TRAIN, "b") == 2
    assert await successor.finished(2) == expected
    assert await successor.submit_without_number(STEP, "d") == 4
    assert (await successor.finished(4)).failure is None


async def test_a_model_that_its_client_numbers_takes_nothing_without_a_number(start: StartWorker) -> None:
    worker = await start()
    await worker.submit(create(), train(1))
    for _ in range(2):
        with pytest.raises(NumbersMixed, match="have a seq_id"):
            await worker.submit_without_number(TRAIN, "a")
        worker = await start()


async def test_a_model_that_is_numbered_here_takes_no_number_of_a_client(start: StartWorker) -> None:
    worker = await start()
    await worker.submit(create())
    await worker.submit_without_number(TRAIN, "a")
    for _ in range(2):
        # With a number that was given, too: what came by it would be taken for a repeat, and never run.
        for numbered in (step(1), step(2)):
            with pytest.raises(NumbersMixed, match="have no seq_id"):
                await worker.submit(numbered)
        worker = await start()


async def test_an_operation_that_a_full_disk_refused_leaves_no_gap(worker: Worker) -> None:
    await worker.submit(create())
    await worker.finished(0)
    journal = worker.service.journal
    [(pages,)] = journal.read(lambda db: db.execute("PRAGMA page_count").fetchall()).result()
    journal.read(lambda db: db.pragma("max_page_count", pages)).result()
    with pytest.raises(JournalFull):
        await worker.submit_without_number(train(0, [1] * 100_000), "a")
    journal.read(lambda db: db.pragma("max_page_count", 10 * pages)).result()
    assert await worker.submit_without_number(TRAIN, "a") == 1
    assert await worker.submit_without_number(STEP, "b") == 2
    assert (await worker.finished(2)).failure is None


@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
def test_numbers_that_were_refused_together_are_given_again(order: tuple[int, int]) -> None:
    given = AssignedSeqIds()
    numbers = {number: key for key, number in (("a", given.assign("a")), ("b", given.assign("b")))}
    for number in order:
        given.take_back(numbers[number], number)
    assert given.assign("c") == 1


def test_the_newest_keys_of_a_model_are_remembered() -> None:
    given = AssignedSeqIds()
    for number in range(REMEMBERED_KEYS + 1):
        given.assign(str(number))
    assert (given.find("0"), given.find("1"), given.last) == (None, 2, REMEMBERED_KEYS + 1)


async def test_a_closed_model_keeps_its_keys_while_a_client_may_repeat_and_then_none(
    start: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """4,096 keys take 750 KiB, and programs come by the thousand."""
    worker = await start()
    await worker.submit(create())
    await worker.submit_without_number(TRAIN, "a")
    await worker.submit(release())
    await worker.finished(RELEASE_SEQ_ID)
    for _ in range(2):
        await worker.service.tidy()
        assert await worker.submit_without_number(TRAIN, "a") == 1
        worker = await start()
    monkeypatch.setattr(tidying, "KEEP_ALL_SECONDS", -1.0)
    await worker.service.tidy()
    queue = worker.service.queues.find(MODEL)
    assert queue is not None
    assert queue.assigned == AssignedSeqIds(1)
    assert await worker.submit_without_number(TRAIN, "a") == 2
    assert "was released" in await worker.failure(2)


async def test_frequent_queries_do_not_read_released_models(worker: Worker) -> None:
    await worker.submit(create(), create(model_id="sess:train:1"), release())
    await worker.finished(RELEASE_SEQ_ID)
    await worker.finished(0, "sess:train:1")
    queues = worker.service.queues
    assert [queue.model_id for queue in queues.open()] == ["sess:train:1"]
    assert queues.open() == queues.unreleased()
    assert worker.service.adapters_used == 1
