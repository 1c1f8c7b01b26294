"""The durable log of a worker: accepted operations, results, snapshots, events.

The log is one SQLite file (WAL, synchronous=FULL, exclusive), used by one thread. Writes that arrive during the sync of
a commit share the next commit, so many submitters need few fsyncs. A future of this module resolves only when the
transaction is on disk.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import apsw
import structlog

from tinsmith_trainer.disk.free_space import ROOM_RETRY_SECONDS, DiskRoom, RetriesForRoom
from tinsmith_trainer.errors import JournalFull, ServerError, VolumeUnsuitable
from tinsmith_trainer.process.exit import fatal_on_error

log = structlog.get_logger(__name__)

T = TypeVar("T")

FORMAT_VERSION = 1
WAL_KEPT_BYTES = 8 * 1024**2
"""The size above which a write-ahead log is truncated immediately, to free disk blocks.

Without this limit, a few large bodies would keep the blocks in use.
"""
SYNC_BUCKETS_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0)

SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS models (
    model_id TEXT PRIMARY KEY,
    state TEXT NOT NULL,              -- creating, live, released, corrupted
    reason TEXT NOT NULL DEFAULT '',
    applied INTEGER NOT NULL DEFAULT -1,      -- last operation inside the snapshot
    closed_below INTEGER NOT NULL DEFAULT 0,
    snapshot_file TEXT, snapshot_digest TEXT,
    tenant TEXT,                      -- whose share of the engine its turns take; NULL: unknown
    damage_seen_by TEXT,              -- the process that found the snapshot missing or altered; NULL: none
    corrupted_at REAL                 -- Unix seconds; NULL: it is not corrupted
);
CREATE TABLE IF NOT EXISTS operations (
    id INTEGER PRIMARY KEY,
    model_id TEXT NOT NULL,
    seq_id INTEGER NOT NULL,          -- the position: the client's number, plus the plain calls before it
    kind INTEGER NOT NULL,
    payload BLOB,                     -- NULL once a snapshot holds its effect
    zstd INTEGER NOT NULL,
    rejection_category TEXT, rejection_message TEXT,
    accepted_at REAL NOT NULL,
    status TEXT NOT NULL,             -- pending, done, failed
    result BLOB,                      -- NULL also when forgotten
    result_protobuf INTEGER, result_bytes INTEGER,
    failure_category TEXT, failure_message TEXT,
    finished_at REAL,
    event_id INTEGER,                 -- of a result: the store must know all events up to it; 0: none
    forward_only INTEGER,             -- of a forward_backward whose body was read
    started_at REAL,                  -- of an operation with a result; NULL: its turn never came
    idempotency_key TEXT,             -- of an operation that came without a number
    UNIQUE (model_id, seq_id)
);
-- Three indexes hold all that their queries ask for: in the rows it lies behind bodies and results of megabytes.
CREATE INDEX IF NOT EXISTS results ON operations (id, model_id, finished_at, result_bytes) WHERE result IS NOT NULL;
CREATE INDEX IF NOT EXISTS timeline
    ON operations (model_id, accepted_at, seq_id, kind, forward_only, started_at, finished_at, status)
    WHERE finished_at IS NOT NULL;
CREATE INDEX IF NOT EXISTS idempotency_keys
    ON operations (model_id, seq_id, idempotency_key) WHERE idempotency_key IS NOT NULL;
CREATE TABLE IF NOT EXISTS events (event_id INTEGER PRIMARY KEY AUTOINCREMENT, body BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS saved_names (
    model_id TEXT NOT NULL, kind INTEGER NOT NULL, name TEXT NOT NULL, event_id INTEGER NOT NULL,
    PRIMARY KEY (model_id, kind, name)
);
CREATE TABLE IF NOT EXISTS forgotten (   -- operations whose rows are gone, as ranges of their numbers
    model_id TEXT NOT NULL, first INTEGER NOT NULL, last INTEGER NOT NULL,
    PRIMARY KEY (model_id, first)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS plain_calls ( -- positions of operations that came without a number, as ranges
    model_id TEXT NOT NULL, first INTEGER NOT NULL, last INTEGER NOT NULL,
    PRIMARY KEY (model_id, first)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS gradients (   -- what the calls since a model's last optimizer step have added up
    model_id TEXT PRIMARY KEY, tokens INTEGER NOT NULL, seconds REAL NOT NULL,
    loss REAL NOT NULL, loss_terms INTEGER NOT NULL, gap REAL NOT NULL, gap_tokens INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS interruptions (
    model_id TEXT NOT NULL, seq_id INTEGER NOT NULL, purpose TEXT NOT NULL, count INTEGER NOT NULL,
    life TEXT NOT NULL,               -- of the process that was counted last
    last_sign TEXT NOT NULL,
    PRIMARY KEY (model_id, seq_id, purpose)
);
"""


@dataclass(slots=True)
class JournalStats:
    """Counters since the start of the process."""

    commits: int = 0
    sync_seconds: float = 0.0
    operations: int = 0
    histogram: list[int] = field(default_factory=lambda: [0] * len(SYNC_BUCKETS_SECONDS))

    def observe(self, seconds: float) -> None:
        self.commits += 1
        self.sync_seconds += seconds
        for index, bound in enumerate(SYNC_BUCKETS_SECONDS):
            if seconds <= bound:
                self.histogram[index] += 1


@dataclass(slots=True)
class _Job(Generic[T]):
    run: Callable[[apsw.Connection], T]
    future: Future[T]
    writes: bool
    must_succeed: bool = False
    uses_reserve: bool = False
    model_id: str = ""


class Journal:
    """The reads and writes of the file, in one thread.

    In each batch, the reads run first, and then the writes in order.

    On a full disk, writes that must succeed wait for space. Reads and refusals continue, and so do writes that fit on
    the disk. Writes of one model stay in order.
    """

    def __init__(self, path: Path, *, vfs: str | None = None, room: DiskRoom | None = None) -> None:
        """Open the journal.

        `room` is the free space of the journal's disk, with a reserve for writes that must succeed.

        Raises VolumeUnsuitable, or ServerError if another version wrote the file.
        """
        self.stats = JournalStats()
        self.path = path
        self._wal = path.with_name(f"{path.name}-wal")
        self._room = room or DiskRoom(path.parent)
        self._waiting: list[_Job[Any]] = []  # writes that must succeed and found no space
        self._retries = RetriesForRoom(self._room)
        self._queue: queue.SimpleQueue[_Job[Any] | None] = queue.SimpleQueue()
        try:
            self._db = self._open(vfs)
        except apsw.Error as error:
            raise VolumeUnsuitable(
                f"The journal {path} cannot be opened: {error}. Free space on its volume and check its permissions; "
                "a damaged journal is lost, and its models resume from their checkpoints on a new volume."
            ) from error
        self._thread = threading.Thread(target=self._serve, name="journal", daemon=True)
        self._thread.start()

    def _open(self, vfs: str | None) -> apsw.Connection:
        try:
            return _open(self.path, vfs)
        except apsw.FullError:
            if not self._room.free_reserve():
                raise
            return _open(self.path, vfs)

    def write(
        self,
        run: Callable[[apsw.Connection], T],
        *,
        must_succeed: bool = False,
        uses_reserve: bool = False,
        model_id: str = "",
    ) -> Future[T]:
        """Run a write in the next transaction. The future resolves when the commit is synced.

        The future fails with JournalFull if the disk is full, and with ServerError if the file cannot be written.
        `uses_reserve` is for writes that free space, and for writes that a start needs. Writes with `uses_reserve` fail
        only when the reserve is used up, too. `must_succeed` is for writes that record effects that have already
        happened. A write with `must_succeed` uses the reserve, then waits for space. A failed write with `must_succeed`
        ends the process, because the state in memory is then newer than the file. The next process continues from the
        file. The future never resolves if the journal is closed before space is free. `model_id` is the model of a
        write that must succeed.
        """
        return self._put(_Job(run, Future(), True, must_succeed, uses_reserve or must_succeed, model_id))

    def read(self, run: Callable[[apsw.Connection], T]) -> Future[T]:
        """Run a read of committed data."""
        return self._put(_Job(run, Future(), writes=False))

    def size_bytes(self) -> int:
        """Return the size of the journal on disk, including the write-ahead log."""
        return _size_of(self.path) + _size_of(self._wal)

    def settle(self, model_id: str) -> None:
        """Return when all earlier writes of this model are on disk, and the callbacks of all futures have run.

        Raises JournalFull while a write of this model, or a write without a model, waits for space.
        """
        names = ("", model_id)
        waits = self._put(_Job(lambda db: any(job.model_id in names for job in self._waiting), Future(), writes=True))
        if waits.result():
            raise self._full()

    def close(self) -> None:
        """Finish queued jobs and close the file.

        Writes that still wait for space are lost. The next process repeats operations without a result on disk.
        """
        self._queue.put(None)
        self._thread.join()

    def _put(self, job: _Job[T]) -> Future[T]:
        # A caller that gives up, for example because its client has ended, must not cancel the write.
        job.future.set_running_or_notify_cancel()
        self._queue.put(job)
        return job.future

    def _serve(self) -> None:
        with fatal_on_error(f"the journal {self.path} could not be kept", blames_the_call=False):
            while self._serve_batch(self._take_batch()):
                pass
            if self._waiting:
                log.warning("writes had no room to the end", path=str(self.path), writes=len(self._waiting))
        self._db.close()

    def _take_batch(self) -> list[_Job[Any] | None]:
        """Return the jobs that have arrived.

        The batch is empty when the writes that wait for space are due for a retry.
        """
        try:
            batch = [self._queue.get(timeout=ROOM_RETRY_SECONDS if self._waiting else None)]
        except queue.Empty:
            return []
        while not self._queue.empty():
            batch.append(self._queue.get())
        return batch

    def _serve_batch(self, batch: list[_Job[Any] | None]) -> bool:
        jobs = [job for job in batch if job is not None]
        for job in jobs:
            if not job.writes:
                _resolve(job, self._db)
        waited_before = bool(self._waiting)
        if waited_before and (None in batch or self._retries.is_due()):
            self._try_waiting()
        writes = [job for job in jobs if job.writes]
        if self._waiting:
            self._commit_one_by_one(writes)
        elif writes:
            self._commit(writes)
        if self._waiting and not waited_before:
            self._retries.begin()
        return None not in batch

    def _commit(self, jobs: list[_Job[Any]]) -> None:
        try:
            results = self._transaction(jobs)
        except apsw.FullError:
            self._commit_one_by_one(jobs)
            return
        except Exception as error:
            self._separate(jobs, error)
            return
        for job, result in zip(jobs, results, strict=True):
            job.future.set_result(result)

    def _transaction(self, jobs: list[_Job[Any]]) -> list[Any]:
        started = time.perf_counter()
        self._db.execute("BEGIN IMMEDIATE")
        try:
            results = [job.run(self._db) for job in jobs]
            self._db.execute("COMMIT")
        except BaseException:
            # SQLite may have rolled back by itself on a full disk.
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise
        self.stats.observe(time.perf_counter() - started)
        self.stats.operations += len(jobs)
        if _size_of(self._wal) > WAL_KEPT_BYTES:
            self._shorten_log()
        return results

    def _shorten_log(self) -> None:
        """Move the content of the write-ahead log to the file.

        The move also frees the space of a transaction that did not fit on the disk.
        """
        try:
            self._db.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
        except apsw.Error as error:  # nothing is lost, because committed data is in the log
            log.warning("the journal's log cannot be folded in", path=str(self.path), reason=str(error))

    def _separate(self, jobs: list[_Job[Any]], error: Exception) -> None:
        """Commit each job in a separate transaction, so that an invalid write fails alone."""
        if len(jobs) == 1:
            _fail(jobs[0], error)
            return
        for job in jobs:
            self._commit([job])

    # ---- on a full disk

    def _commit_one_by_one(self, jobs: list[_Job[Any]]) -> None:
        for job in jobs:
            if self._is_behind(job):
                self._waiting.append(job)
            elif not self._commit_unless_full(job):
                log.warning("a write waits for room", path=str(self.path))
                self._waiting.append(job)

    def _is_behind(self, job: _Job[Any]) -> bool:
        return job.must_succeed and any(job.model_id == waiting.model_id for waiting in self._waiting)

    def _try_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        self._commit_one_by_one(waiting)
        if len(self._waiting) == len(waiting):
            self._retries.failed()
        else:
            self._retries.begin()

    def _commit_unless_full(self, job: _Job[Any]) -> bool:
        """Commit the job. Return False if the disk is full and the job must wait for space."""
        try:
            [result] = self._transaction_from_reserve(job) if job.uses_reserve else self._transaction([job])
        except apsw.FullError:
            self._shorten_log()
            if job.must_succeed:
                return False
            job.future.set_exception(self._full())
        except Exception as error:
            _fail(job, error)
        else:
            job.future.set_result(result)
        return True

    def _transaction_from_reserve(self, job: _Job[Any]) -> list[Any]:
        try:
            return self._transaction([job])
        except apsw.FullError:
            if not self._room.free_reserve():
                raise
            return self._transaction([job])

    def _full(self) -> JournalFull:
        return JournalFull(f"No room on the volume of {self.path}: make room, then retry.")


def _size_of(file: Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return 0


def _resolve(job: _Job[Any], db: apsw.Connection) -> None:
    try:
        job.future.set_result(job.run(db))
    except Exception as error:
        job.future.set_exception(error)


def _fail(job: _Job[Any], error: Exception) -> None:
    if job.must_succeed:
        raise error
    job.future.set_exception(ServerError(f"The journal could not be written: {error}"))


def _open(path: Path, vfs: str | None) -> apsw.Connection:
    db = apsw.Connection(str(path), vfs=vfs)
    db.set_busy_timeout(0)
    db.pragma("locking_mode", "EXCLUSIVE")
    db.pragma("journal_mode", "WAL")
    db.pragma("synchronous", "FULL")
    db.execute(SCHEMA)
    db.execute("INSERT OR IGNORE INTO meta VALUES ('format_version', ?)", (str(FORMAT_VERSION),))
    # A server may remember a cursor of a lost volume. Events of a new volume get higher numbers than this cursor
    # (`raise_epoch` does the same).
    db.execute(
        "INSERT INTO sqlite_sequence (name, seq) SELECT 'events', ?"
        " WHERE NOT EXISTS (SELECT 1 FROM sqlite_sequence WHERE name = 'events')",
        (time.time_ns() // 1_000_000,),
    )
    [(version,)] = db.execute("SELECT value FROM meta WHERE key = 'format_version'").fetchall()
    if int(str(version)) != FORMAT_VERSION:
        raise ServerError(
            f"{path} has journal format {version}; this worker reads format {FORMAT_VERSION}. "
            "Start it with the version that wrote the journal."
        )
    return db
