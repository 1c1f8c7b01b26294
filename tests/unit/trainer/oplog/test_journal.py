"""The journal: nothing is acknowledged before it is on disk, and many share one fsync."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import apsw
import pytest
from support.worker.faulting_files import LossyVfs, lossy_vfs, restore
from tinsmith_trainer.errors import JournalFull, ServerError
from tinsmith_trainer.oplog.journal import Journal
from tinsmith_trainer.oplog.journal_tables import set_meta

SUBMITTERS = 64


@pytest.fixture
def vfs() -> Iterator[LossyVfs]:
    with lossy_vfs("lossy") as vfs:
        yield vfs


def read_all(path: Path) -> dict[str, str]:
    with apsw.Connection(str(path)) as db:
        return dict(db.execute("SELECT key, value FROM meta WHERE key != 'format_version'").fetchall())


def test_what_was_acknowledged_survives_a_power_cut(tmp_path: Path, vfs: LossyVfs) -> None:
    journal = Journal(tmp_path / "journal", vfs="lossy")
    journal.write(lambda db: set_meta(db, "acknowledged", "yes")).result()
    disk = vfs.image()
    journal.close()
    restore(disk, tmp_path, tmp_path / "after")
    assert read_all(tmp_path / "after" / "journal") == {"acknowledged": "yes"}


def test_the_lossy_file_layer_does_lose_what_was_not_synced(tmp_path: Path, vfs: LossyVfs) -> None:
    """The test above could not fail otherwise."""
    db = apsw.Connection(str(tmp_path / "plain"), vfs="lossy")
    db.pragma("synchronous", "OFF")
    db.execute("CREATE TABLE meta (key TEXT, value TEXT); INSERT INTO meta VALUES ('acknowledged', 'yes')")
    assert vfs.image() == {tmp_path / "plain": b""}
    db.close()


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


def test_one_bad_write_does_not_take_its_neighbours_down(tmp_path: Path) -> None:
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


def test_what_has_happened_and_cannot_be_written_ends_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its memory is ahead of the file; one that went on would acknowledge what the next process does not know."""
    ended: Future[int] = Future()
    monkeypatch.setattr(os, "_exit", ended.set_result)
    journal = Journal(tmp_path / "journal")
    result = journal.write(fail_with_io_error, must_succeed=True)
    assert ended.result(10) == 1
    assert not result.done()
    journal.close()


async def test_a_caller_that_gives_up_leaves_the_journal_at_work(tmp_path: Path) -> None:
    """As the call of a server that died does."""
    journal = Journal(tmp_path / "journal.sqlite")
    may_go_on = threading.Event()
    blocked = journal.read(lambda db: may_go_on.wait(10))
    waiting = [asyncio.wrap_future(ask(lambda db: None)) for ask in (journal.read, journal.write)]
    for future in waiting:
        future.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    may_go_on.set()
    assert blocked.result(10)
    assert journal.write(lambda db: "still here").result(10) == "still here"
    journal.close()


def fail_with_io_error(db: apsw.Connection) -> None:
    raise apsw.IOError("disk I/O error")
