"""The journal: nothing is acknowledged before it is on disk, and many share one fsync."""

from __future__ import annotations

import ast
import asyncio
import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import apsw
import pytest
from support.small_disk import MIB, SmallDisk, on_small_disk
from support.worker.faulting_files import LossyVfs, lossy_vfs, restore
from tinsmith_trainer import oplog, training
from tinsmith_trainer.disk import free_space
from tinsmith_trainer.disk.free_space import DiskRoom
from tinsmith_trainer.errors import JournalFull, ServerError
from tinsmith_trainer.oplog import journal as journal_module
from tinsmith_trainer.oplog.journal import Journal
from tinsmith_trainer.oplog.journal_tables import get_meta, set_meta

SUBMITTERS = 64
TABLES = {
    "meta": "key TEXT, value TEXT",
    "models": (
        "model_id TEXT, state TEXT, reason TEXT, applied INTEGER, closed_below INTEGER, snapshot_file TEXT,"
        " snapshot_digest TEXT, tenant TEXT, damage_seen_by TEXT, corrupted_at REAL"
    ),
    "operations": (
        "id INTEGER, model_id TEXT, seq_id INTEGER, kind INTEGER, payload BLOB, zstd INTEGER, rejection_category TEXT,"
        " rejection_message TEXT, accepted_at REAL, status TEXT, result BLOB, result_protobuf INTEGER,"
        " result_bytes INTEGER, failure_category TEXT, failure_message TEXT, finished_at REAL, event_id INTEGER,"
        " forward_only INTEGER, started_at REAL, idempotency_key TEXT"
    ),
    "events": "event_id INTEGER, body BLOB",
    "saved_names": "model_id TEXT, kind INTEGER, name TEXT, event_id INTEGER",
    "forgotten": "model_id TEXT, first INTEGER, last INTEGER",
    "plain_calls": "model_id TEXT, first INTEGER, last INTEGER",
    "gradients": (
        "model_id TEXT, tokens INTEGER, seconds REAL, loss REAL, loss_terms INTEGER, gap REAL, gap_tokens INTEGER"
    ),
    "interruptions": "model_id TEXT, seq_id INTEGER, purpose TEXT, count INTEGER, life TEXT, last_sign TEXT",
}
"""The columns of format 1, in the order in which a row holds them."""


@pytest.fixture
def vfs() -> Iterator[LossyVfs]:
    with lossy_vfs("lossy") as vfs:
        yield vfs


def read_all(path: Path) -> dict[str, str]:
    with apsw.Connection(str(path)) as db:
        return dict(db.execute("SELECT key, value FROM meta WHERE key != 'format_version'").fetchall())


def test_acknowledged_operations_survive_a_power_cut(tmp_path: Path, vfs: LossyVfs) -> None:
    journal = Journal(tmp_path / "journal", vfs="lossy")
    journal.write(lambda db: set_meta(db, "acknowledged", "yes")).result()
    disk = vfs.image()
    journal.close()
    restore(disk, tmp_path, tmp_path / "after")
    assert read_all(tmp_path / "after" / "journal") == {"acknowledged": "yes"}


async def test_64_concurrent_submitters_need_fewer_than_a_quarter_fsync_each(tmp_path: Path, vfs: LossyVfs) -> None:
    journal = Journal(tmp_path / "journal", vfs="lossy")
    before = vfs.syncs

    async def submit(number: int) -> None:
        for step in range(10):
            key = f"{number}/{step}"
            await asyncio.wrap_future(journal.write(lambda db, key=key: set_meta(db, key, "x")))  # type: ignore[misc]

    await asyncio.gather(*(submit(number) for number in range(SUBMITTERS)))
    assert (vfs.syncs - before) / (SUBMITTERS * 10) < 0.25
    journal.close()
    assert len(read_all(tmp_path / "journal")) == SUBMITTERS * 10


def test_one_bad_write_does_not_fail_its_neighbours(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    gate = threading.Event()
    journal.read(lambda db: gate.wait())  # so that the three share a transaction
    good = journal.write(lambda db: set_meta(db, "good", "1"))
    bad = journal.write(lambda db: db.execute("INSERT INTO nowhere VALUES (1)"))
    also_good = journal.write(lambda db: set_meta(db, "also good", "1"))
    gate.set()
    good.result()
    also_good.result()
    with pytest.raises(ServerError, match="nowhere"):
        bad.result()
    journal.close()
    assert read_all(tmp_path / "journal") == {"good": "1", "also good": "1"}


def test_finished_work_waits_on_a_full_disk_and_other_requests_are_served(tmp_path: Path) -> None:
    async def scenario(disk: SmallDisk) -> None:
        journal = Journal(tmp_path / "journal")
        journal.write(lambda db: set_meta(db, "before", "1")).result()
        disk.fill(leaving_bytes=MIB)
        large = "x" * 2 * MIB
        with pytest.raises(JournalFull, match="make room"):
            journal.write(lambda db: set_meta(db, "refused", large)).result()
        first = journal.write(lambda db: set_meta(db, "result", large), must_succeed=True, model_id="a")
        behind = journal.write(lambda db: set_meta(db, "result", "newer"), must_succeed=True, model_id="a")
        others = journal.write(lambda db: set_meta(db, "others", "1"), must_succeed=True, model_id="b")
        assert journal.read(lambda db: get_meta(db, "before")).result() == "1"
        others.result()
        journal.write(lambda db: set_meta(db, "small", "1")).result()
        with pytest.raises(JournalFull):
            journal.settle("a")
        journal.settle("b")
        assert (first.done(), behind.done()) == (False, False)
        disk.make_room()
        behind.result()
        assert first.done()
        journal.settle("a")
        journal.close()
        assert read_all(tmp_path / "journal") == {"before": "1", "others": "1", "small": "1", "result": "newer"}

    on_small_disk(tmp_path, 16, scenario)


def test_a_write_that_finds_no_room_again_and_again_is_tried_less_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (free_space, journal_module):
        monkeypatch.setattr(module, "ROOM_RETRY_SECONDS", 0.01)
    waits: list[float] = []
    tried = threading.Semaphore(0)

    def find_no_room(db: apsw.Connection) -> None:
        waits.append(journal._retries._seconds)
        tried.release()
        raise apsw.FullError("larger than the disk")

    journal = Journal(tmp_path / "journal")
    journal.write(find_no_room, must_succeed=True)
    first, retries = 2, 3  # alone, and with what came at the same time
    for _ in range(first + retries):
        assert tried.acquire(timeout=10)
    journal.close()
    assert waits[first : first + retries] == [0.01, 0.02, 0.04]


def test_a_journal_closed_on_a_full_disk_ends_and_leaves_waiting_operations_open(tmp_path: Path) -> None:
    async def scenario(disk: SmallDisk) -> None:
        journal = Journal(tmp_path / "journal")
        disk.fill(leaving_bytes=MIB)
        waiting = journal.write(lambda db: set_meta(db, "result", "x" * 2 * MIB), must_succeed=True)
        journal.close()
        assert not waiting.done()

    on_small_disk(tmp_path, 16, scenario)


def test_the_reserve_serves_mandatory_writes_and_is_created_again_when_space_is_free(tmp_path: Path) -> None:
    async def scenario(disk: SmallDisk) -> None:
        room = DiskRoom(tmp_path, 4 * MIB, tmp_path / "reserve")
        room.keep_reserve()
        journal = Journal(tmp_path / "journal", room=room)
        disk.fill()
        large = "x" * MIB
        with pytest.raises(JournalFull):
            journal.write(lambda db: set_meta(db, "body", large)).result()
        journal.write(lambda db: set_meta(db, "release", large), uses_reserve=True).result()
        assert not (tmp_path / "reserve").exists()
        room.keep_reserve()
        assert not (tmp_path / "reserve").exists()
        disk.make_room()
        room.keep_reserve()
        assert (tmp_path / "reserve").exists()
        journal.close()

    on_small_disk(tmp_path, 16, scenario)


def test_a_journal_of_another_format_is_refused(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    journal.write(lambda db: set_meta(db, "format_version", "99")).result()
    journal.close()
    with pytest.raises(ServerError, match="format 99"):
        Journal(tmp_path / "journal")


def test_an_error_of_the_disk_fails_its_writes_and_not_the_journal(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    journal.read(lambda db: db.pragma("max_page_count", 20)).result()
    gate = threading.Event()
    journal.read(lambda db: gate.wait())  # so that both share the transaction that finds the disk full
    refused = journal.write(lambda db: set_meta(db, "large", "x" * 200_000))
    broken = journal.write(fail_with_io_error)
    gate.set()
    with pytest.raises(JournalFull):
        refused.result()
    with pytest.raises(ServerError, match="disk I/O error"):
        broken.result()
    journal.write(lambda db: set_meta(db, "small", "x")).result()
    journal.close()


def test_a_completed_operation_that_cannot_be_recorded_ends_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its memory is ahead of the file; continuing would acknowledge operations that the next process lacks."""
    ended: Future[int] = Future()
    monkeypatch.setattr(os, "_exit", ended.set_result)
    journal = Journal(tmp_path / "journal")
    result = journal.write(fail_with_io_error, must_succeed=True)
    assert ended.result(10) == 1
    assert not result.done()
    journal.close()


def fail_with_io_error(db: apsw.Connection) -> None:
    raise apsw.IOError("disk I/O error")


def test_every_callback_of_the_journal_ends_the_process_where_it_fails() -> None:
    """`concurrent.futures` logs an error of a callback and continues: an acknowledged operation would never run."""
    given = [
        node.args[0]
        for package in (oplog, training)
        for path in Path(*package.__path__).glob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_done_callback"
    ]
    assert len(given) >= 4
    assert {ast.unparse(each).partition("(")[0] for each in given} == {"fatal_callback"}


def test_the_tables_of_a_new_journal_are_those_of_its_format(tmp_path: Path) -> None:
    Journal(tmp_path / "journal").close()
    with apsw.Connection(str(tmp_path / "journal")) as db:
        names = db.execute(
            "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'"
        ).fetchall()
        tables = {
            name: ", ".join(f"{column} {kind}" for _, column, kind, *_ in db.execute(f"PRAGMA table_info({name})"))
            for (name,) in names
        }
        assert db.execute("SELECT value FROM meta WHERE key = 'format_version'").fetchall() == [("1",)]
    assert tables == TABLES
