"""A volume that the release before wrote is taken over: nothing is lost, and what it does not say is found out."""

from __future__ import annotations

from pathlib import Path

import apsw
import pytest
from support.worker.in_process import Worker
from support.worker.process import MODEL, broken_train, create, save, step, train
from tinsmith_trainer.training import codec, executor

from .conftest import StartWorker
from .test_poorer_starts import crash

BEFORE = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS models (
    model_id TEXT PRIMARY KEY,
    state TEXT NOT NULL,              -- creating, live, released, corrupted
    reason TEXT NOT NULL DEFAULT '',
    applied INTEGER NOT NULL DEFAULT -1,      -- last operation inside the snapshot
    closed_below INTEGER NOT NULL DEFAULT 0,
    snapshot_file TEXT,
    snapshot_digest TEXT
);
CREATE TABLE IF NOT EXISTS operations (
    id INTEGER PRIMARY KEY,
    model_id TEXT NOT NULL,
    seq_id INTEGER NOT NULL,
    kind INTEGER NOT NULL,
    payload BLOB,                     -- NULL once a snapshot holds its effect
    zstd INTEGER NOT NULL,
    rejection_category TEXT,
    rejection_message TEXT,
    accepted_at REAL NOT NULL,
    status TEXT NOT NULL,             -- pending, done, failed
    result BLOB,                      -- NULL also when forgotten
    result_protobuf INTEGER,
    result_bytes INTEGER,
    failure_category TEXT,
    failure_message TEXT,
    finished_at REAL,
    UNIQUE (model_id, seq_id)
);
CREATE INDEX IF NOT EXISTS results_by_age ON operations (finished_at, id, result_bytes) WHERE result IS NOT NULL;
CREATE TABLE IF NOT EXISTS events (event_id INTEGER PRIMARY KEY AUTOINCREMENT, body BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS saved_names (
    model_id TEXT NOT NULL, kind INTEGER NOT NULL, name TEXT NOT NULL, event_id INTEGER NOT NULL,
    PRIMARY KEY (model_id, kind, name)
);
CREATE TABLE IF NOT EXISTS interruptions (
    model_id TEXT NOT NULL, seq_id INTEGER NOT NULL, purpose TEXT NOT NULL, count INTEGER NOT NULL,
    life TEXT NOT NULL,               -- of the process that was counted last
    last_sign TEXT NOT NULL,
    PRIMARY KEY (model_id, seq_id, purpose)
);
"""
"""As the release before the columns `event_id` and `forward_only` made it."""


def rewrite_as_before(journal: Path) -> None:
    """The same rows, in a file that the release before made."""
    today = journal.rename(journal.with_name("today.sqlite"))
    with apsw.Connection(str(journal)) as db:
        db.execute(BEFORE)
        db.execute("ATTACH ? AS today", (str(today),))
        for (table,) in db.execute("SELECT name FROM main.sqlite_master WHERE type = 'table'").fetchall():
            columns = ", ".join(name for (name,) in db.execute("SELECT name FROM pragma_table_info(?)", (table,)))
            db.execute(f"INSERT INTO main.{table} ({columns}) SELECT {columns} FROM today.{table}")


async def test_a_journal_of_the_release_before_opens_and_goes_on(
    start: StartWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = (create(), save(1, "a"), train(2), train(3, forward_only=True), step(4), train(5), broken_train(6))
    after = (step(7), train(8), step(9), save(10, "b"))
    undisturbed, first = Worker(tmp_path / "undisturbed"), await start()
    await undisturbed.service.activate(1)
    for each in (undisturbed, first):
        await each.submit(*before)
        await each.finished(6)
    crash(first, monkeypatch)
    await first.service.drain()
    rewrite_as_before(tmp_path / "volume" / "journal.sqlite")
    successor = await start()
    for each in (undisturbed, successor):
        await each.submit(*after)
    for call in (*before, *after):
        found, wanted = await successor.finished(call.seq_id), await undisturbed.finished(call.seq_id)
        assert (found.payload, found.protobuf, found.failure) == (wanted.payload, wanted.protobuf, wanted.failure)
    assert (await successor.failure(7)).startswith("user: optim_step was not applied")
    assert (await successor.finished(1)).event_id is None, "a server has to drain all for it"
    assert (await successor.finished(10)).event_id == (await successor.events())[-1].event_id
    tensors = [each.engine.state(MODEL).tensors for each in (undisturbed, successor)]
    assert all((tensors[0][name] == tensors[1][name]).all() for name in tensors[0])
    await undisturbed.service.drain()


async def test_a_replay_reads_a_gradients_body_once_and_no_other(
    start: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = await start()
    await worker.submit(create(), train(1), train(2, forward_only=True), broken_train(3))
    await worker.finished(3)
    crash(worker, monkeypatch)
    read: list[int] = []

    def counted(body: bytes, *, zstd: bool) -> codec.OpenedBody:
        read.append(len(body))
        return codec.open_body(body, zstd=zstd)

    await worker.service.drain()
    monkeypatch.setattr(executor, "open_body", counted)
    successor = await start()
    await successor.recovered()
    assert read == [len(train(1).payload)]
