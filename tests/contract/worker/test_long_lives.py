"""The results of a long-lived model: old ones are reduced to numbers, and answers stay as promised."""

from __future__ import annotations

from pathlib import Path

import apsw
import pytest
from support.worker.in_process import Worker
from support.worker.process import MODEL, broken_train, create, save, step, train
from tinsmith_rpc import RELEASE_SEQ_ID
from tinsmith_trainer.errors import JournalFull
from tinsmith_trainer.oplog import journal_retention, tidying
from tinsmith_trainer.training import snapshotting

from .conftest import StartWorker
from .test_life import release
from .test_poorer_starts import crash

MISSING, LAST = 5, 11
PAST = (
    *(create(), train(1), step(2), train(3), step(4)),
    *(train(6), step(7)),  # which fails, since 5 never came
    *(train(8), step(9), train(10), step(LAST)),
)
STEPS = 4


@pytest.fixture(autouse=True)
def short_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three operations below the snapshot, however young."""
    monkeypatch.setattr(tidying, "KEEP_OPERATIONS", 3)
    monkeypatch.setattr(tidying, "KEEP_ALL_SECONDS", 0.0)


async def lived(start: StartWorker) -> Worker:
    """Return a worker with a history below its snapshot, of which tidying has left what is kept."""
    worker = await start()
    await worker.submit(*PAST)
    await worker.finished(LAST)
    await worker.service.snapshot()
    await worker.service.tidy()
    return worker


def rows(worker: Worker) -> list[int]:
    def read(db: apsw.Connection) -> list[int]:
        return [int(seq_id) for (seq_id,) in db.execute("SELECT seq_id FROM operations ORDER BY seq_id")]

    return worker.service.journal.read(read).result()


@pytest.mark.core("durability 10")
async def test_the_newest_results_stay_and_older_ones_are_gone(start: StartWorker) -> None:
    worker = await lived(start)
    assert rows(worker) == [9, 10, 11]
    newest = await worker.finished(9)
    successor = await start()
    assert await successor.finished(9) == newest
    for seq_id in (0, 3, 7):
        gone = await successor.finished(seq_id)
        assert (gone.payload, gone.failure) == (None, None)


async def test_a_repeated_submit_of_a_deleted_operation_is_acknowledged_and_runs_nothing(start: StartWorker) -> None:
    worker = await lived(start)
    for life in (1, 2):
        await worker.submit(create(seed=8), train(1), step(2))
        assert (await worker.finished(2)).failure is None
        next_one = LAST + 2 * life
        await worker.submit(train(next_one - 1), step(next_one))
        assert (await worker.finished(next_one)).failure is None
        assert rows(worker)[:3] == [9, 10, 11]
        assert worker.engine.state(MODEL).optimizer_step == STEPS + life
        worker = await start()


async def test_an_interrupted_life_is_the_same_bit_for_bit(
    start: StartWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through forgetting, a crash, and a replay of what came after the snapshot."""
    after = (train(12), step(13), broken_train(14), step(15), train(16), step(17), save(18, "a"))
    undisturbed = Worker(tmp_path / "undisturbed")
    await undisturbed.service.activate(1)
    await undisturbed.submit(*PAST, *after)
    worker = await lived(start)
    await worker.submit(*after[:4])
    await worker.finished(15)
    await worker.service.tidy()
    assert rows(worker) == [9, 10, 11, 12, 13, 14, 15]
    crash(worker, monkeypatch)
    successor = await start()
    await successor.submit(*after[4:])
    for call in after:
        found, wanted = await successor.finished(call.seq_id), await undisturbed.finished(call.seq_id)
        assert (found.payload, found.failure) == (wanted.payload, wanted.failure)
    tensors = [each.engine.state(MODEL).tensors for each in (undisturbed, successor)]
    assert {name: value.tobytes() for name, value in tensors[0].items()} == {
        name: value.tobytes() for name, value in tensors[1].items()
    }
    await undisturbed.service.drain()


async def test_memory_has_only_the_numbers_of_operations_with_a_result(
    start: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = await start()
    await worker.submit(create(), *(train(seq_id) for seq_id in range(1, 40)), broken_train(40), train(42))
    await worker.finished(40)
    queue = worker.service.queues.find(MODEL)
    assert queue is not None
    assert (list(queue.entries), list(queue.settled)) == ([42], [(0, 40)])
    crash(worker, monkeypatch)
    successor = await start()
    await successor.submit(step(43))
    await successor.finished(43)
    queue = successor.service.queues.find(MODEL)
    assert queue is not None
    assert (list(queue.entries), list(queue.settled)) == ([], [(0, 40), (42, 43)])


async def test_very_many_operations_bring_a_snapshot_even_where_they_all_fail(
    start: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They cost nothing to run again, but each is read at a start."""
    monkeypatch.setattr(snapshotting, "MOST_UNSAVED_OPERATIONS", 10)
    worker = await start()
    await worker.submit(create(), *(broken_train(seq_id) for seq_id in range(1, 35)))
    await worker.finished(34)
    await worker.service.tidy()
    queue = worker.service.queues.find(MODEL)
    assert queue is not None
    assert 34 - queue.snapshot_applied <= 10
    assert len(rows(worker)) <= 3 + 10
    crash(worker, monkeypatch)
    successor = await start()
    await successor.submit(step(35))
    assert "forward_backward 1 failed" in await successor.failure(35)


async def test_a_full_disk_takes_no_model_of_which_only_numbers_remain(start: StartWorker) -> None:
    worker = await lived(start)
    journal = worker.service.journal
    [(pages,)] = journal.read(lambda db: db.execute("PRAGMA page_count").fetchall()).result()
    journal.read(lambda db: db.pragma("max_page_count", pages)).result()
    with pytest.raises(JournalFull):
        await worker.submit(train(12, [1] * 100_000))
    journal.read(lambda db: db.pragma("max_page_count", 10 * pages)).result()
    await worker.submit(train(12), step(13))
    assert (await worker.finished(13)).failure is None


async def test_a_page_that_cannot_be_read_ends_a_round_and_not_the_worker(
    start: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = await lived(start)

    def damaged(*_: object, **__: object) -> None:
        raise apsw.CorruptError("database disk image is malformed")

    with monkeypatch.context() as broken:
        broken.setattr(journal_retention, "spent_numbers", damaged)
        await worker.service.tidy()
    await worker.submit(train(12), step(13))
    assert (await worker.finished(13)).failure is None


async def test_a_call_for_a_model_that_was_just_forgotten_leaves_no_row(
    start: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = await start()
    await worker.submit(create(), release())
    await worker.finished(RELEASE_SEQ_ID)
    monkeypatch.setattr(tidying, "KEEP_RESULTS_SECONDS", -1.0)
    forget, queues = worker.service.queues.forget, worker.service.queues
    gone: list[str] = []
    monkeypatch.setattr(queues, "forget", lambda models: gone.extend(models) or [])
    await worker.service.tidy()
    await worker.submit(train(1))
    assert (gone, rows(worker)) == ([MODEL], [])
    forget(gone)


async def test_events_of_a_new_volume_come_after_the_servers_cursor_regardless_of_the_clock(tmp_path: Path) -> None:
    """A server reads what is behind its cursor alone: saves of a volume whose clock is behind would have no records."""
    cursor = 2**60
    worker = Worker(tmp_path / "new")
    await worker.service.activate(1, cursor)
    await worker.submit(create(), save(1, "a"))
    await worker.finished(1)
    assert [event.event_id for event in await worker.events()] == [cursor + 1, cursor + 2]
    await worker.service.activate(2, 5)
    await worker.submit(save(2, "b"))
    await worker.finished(2)
    assert [event.event_id for event in await worker.events()] == [cursor + 1, cursor + 2, cursor + 3]
    await worker.service.drain()
