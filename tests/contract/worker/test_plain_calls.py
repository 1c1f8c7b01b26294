"""Operations that come without a number run after all that have been accepted before, once for each key."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from support.worker.in_process import Worker
from support.worker.process import MODEL, create, step, train
from tinsmith_rpc import PLAIN_SEQ_IDS, RELEASE_SEQ_ID
from tinsmith_trainer.errors import JournalFull
from tinsmith_trainer.oplog import tidying
from tinsmith_trainer.oplog.plain_calls import REMEMBERED_KEYS, PlainCalls

from .conftest import StartWorker
from .test_life import release

TRAIN, STEP = train(0), step(0)


def plain(position: int) -> int:
    """Return the number by which a client knows the plain call at this position."""
    return PLAIN_SEQ_IDS + position


async def test_a_repeated_key_gets_the_same_number_and_runs_once(worker: Worker) -> None:
    await worker.submit(create())
    numbers = await asyncio.gather(*(worker.submit_without_number(TRAIN, "a") for _ in range(8)))
    assert set(numbers) == {plain(1)}
    first = await worker.finished(plain(1))
    assert await worker.submit_without_number(train(0, (9, 9, 9)), "a") == plain(1)
    assert await worker.finished(plain(1)) == first
    assert await worker.submit_without_number(STEP, "b") == plain(2)


async def test_many_at_once_get_each_its_own(worker: Worker) -> None:
    await worker.submit(create())
    numbers = await asyncio.gather(*(worker.submit_without_number(TRAIN, f"{key}") for key in range(20)))
    assert sorted(numbers) == [plain(position) for position in range(1, 21)]
    assert (await worker.finished(plain(20))).failure is None


async def test_keys_and_numbers_outlive_the_process(start: StartWorker) -> None:
    worker = await start()
    await worker.submit(create())
    for key in "abc":
        await worker.submit_without_number(TRAIN, key)
    expected = await worker.finished(plain(2))
    successor = await start()
    assert await successor.submit_without_number(TRAIN, "b") == plain(2)
    assert await successor.finished(plain(2)) == expected
    assert await successor.submit_without_number(STEP, "d") == plain(4)
    assert (await successor.finished(plain(4))).failure is None


async def test_plain_calls_run_between_the_numbered_calls_of_an_sdk_with_the_same_weights(start: StartWorker) -> None:
    """The numbers of the SDK continue after a plain call, also after a restart."""
    worker = await start()
    await worker.submit(create(), create(model_id="other:train:0"), train(1))
    await worker.submit_without_number(STEP, "a")
    await worker.submit(train(2))
    await worker.finished(2)
    successor = await start()
    assert await successor.submit_without_number(STEP, "b") == plain(4)
    await successor.submit(train(3))
    assert await successor.submit_without_number(STEP, "a") == plain(2)
    await successor.submit(step(4))
    mixed = [(await successor.finished(seq_id)).payload for seq_id in (1, plain(2), 2, plain(4), 3, 4)]
    numbered = [train(1), step(2), train(3), step(4), train(5), step(6)]
    await successor.submit(*(replace(call, model_id="other:train:0") for call in numbered))
    assert mixed == [(await successor.finished(seq_id, "other:train:0")).payload for seq_id in range(1, 7)]


async def test_a_plain_call_waits_for_the_chunks_below_the_accepted_ones_and_closes_no_gap(worker: Worker) -> None:
    await worker.submit(create(), train(2))
    number = await worker.submit_without_number(STEP, "a")
    assert await worker.service.wait_for(MODEL, number, 0.05) is None
    assert worker.service.pending(MODEL, number).reason == "waiting for operation 1, which has not arrived yet"
    await worker.submit(train(1))
    assert (await worker.finished(number)).failure is None
    await worker.submit(step(3))
    assert (await worker.finished(3)).failure is None


async def test_a_numbered_call_that_comes_too_late_is_named_by_its_own_number(worker: Worker) -> None:
    await worker.submit(create())
    await worker.submit_without_number(TRAIN, "a")
    await worker.submit(step(2))
    assert (await worker.finished(2)).failure is not None  # its gradient is incomplete
    await worker.submit(train(1))
    assert "operation 1 of " in await worker.failure(1)


async def test_an_operation_that_a_full_disk_refused_leaves_no_gap(worker: Worker) -> None:
    await worker.submit(create())
    await worker.finished(0)
    journal = worker.service.journal
    [(pages,)] = journal.read(lambda db: db.execute("PRAGMA page_count").fetchall()).result()
    journal.read(lambda db: db.pragma("max_page_count", pages)).result()
    with pytest.raises(JournalFull):
        await worker.submit_without_number(train(0, [1] * 100_000), "a")
    journal.read(lambda db: db.pragma("max_page_count", 10 * pages)).result()
    assert await worker.submit_without_number(TRAIN, "a") == plain(1)
    assert await worker.submit_without_number(STEP, "b") == plain(2)
    assert (await worker.finished(plain(2))).failure is None


async def test_a_call_that_was_refused_below_an_accepted_one_keeps_its_position(start: StartWorker) -> None:
    """The number of a later call depends on the plain calls before it, also after a restart."""
    worker = await start()
    await worker.submit(create())
    await worker.finished(0)
    journal = worker.service.journal
    [(pages,)] = journal.read(lambda db: db.execute("PRAGMA page_count").fetchall()).result()
    journal.read(lambda db: db.pragma("max_page_count", pages + 4)).result()
    refused, accepted = await asyncio.gather(
        worker.submit_without_number(train(0, [1] * 100_000), "a"),
        worker.submit_without_number(TRAIN, "b"),
        return_exceptions=True,
    )
    assert isinstance(refused, JournalFull)
    assert accepted == plain(2)
    journal.read(lambda db: db.pragma("max_page_count", 10 * pages)).result()
    await worker.submit(train(1))
    assert (await worker.finished(1)).failure is None
    successor = await start()
    await successor.submit(train(1), step(2))
    assert await successor.finished(1) == await worker.finished(1)
    assert (await successor.finished(2)).failure is None


def test_the_newest_keys_of_a_model_are_remembered() -> None:
    calls = PlainCalls()
    for position in range(1, REMEMBERED_KEYS + 2):
        calls.place(str(position), position)
    assert (calls.find("1"), calls.find("2"), calls.keys) == (None, 2, REMEMBERED_KEYS)


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
        assert await worker.submit_without_number(TRAIN, "a") == plain(1)
        worker = await start()
    monkeypatch.setattr(tidying, "KEEP_ALL_SECONDS", -1.0)
    await worker.service.tidy()
    queue = worker.service.queues.find(MODEL)
    assert queue is not None
    assert queue.plain.keys == 0
    assert await worker.submit_without_number(TRAIN, "a") == plain(2)
    assert "was released" in await worker.failure(plain(2))


async def test_frequent_queries_do_not_read_released_models(worker: Worker) -> None:
    await worker.submit(create(), create(model_id="sess:train:1"), release())
    await worker.finished(RELEASE_SEQ_ID)
    await worker.finished(0, "sess:train:1")
    queues = worker.service.queues
    assert [queue.model_id for queue in queues.open()] == ["sess:train:1"]
    assert queues.open() == queues.unreleased()
    assert worker.service.adapters_used == 1
