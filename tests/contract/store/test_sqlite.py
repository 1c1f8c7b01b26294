"""The failures that only a SQLite store can have."""

import asyncio
import contextlib
import fcntl
import sqlite3
from pathlib import Path

import pytest
from sqlalchemy import Connection, Engine, event, select, update
from sqlalchemy.ext.asyncio import AsyncConnection
from support.server.store_records import a_session
from tinsmith_server.store import database, migrate
from tinsmith_server.store.connection import StoreUnavailable, parse_store_url
from tinsmith_server.store.database import Database
from tinsmith_server.store.store import open_store
from tinsmith_server.store.tables import workers

pytestmark = pytest.mark.core


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/store.db"


async def test_each_commit_is_synced(url: str) -> None:
    """An acknowledged create_model survives the loss of power, which `synchronous=NORMAL` does not promise."""
    await (await open_store(url)).close()
    store = Database(parse_store_url(url))

    async def settings(connection: AsyncConnection) -> list[object]:
        pragmas = ("journal_mode", "synchronous", "foreign_keys")
        return [(await connection.exec_driver_sql(f"PRAGMA {pragma}")).scalar_one() for pragma in pragmas]

    found = await store.write(settings)

    await store.close()
    assert found == ["wal", 2, 1]


async def test_transactions_that_read_before_they_write_wait_for_each_other(url: str) -> None:
    """With a plain BEGIN the second of two would fail with "database is locked" at its first write."""
    store = await open_store(url)
    await store.get_worker("worker-1")
    await store.close()
    databases = [Database(parse_store_url(url)) for _ in range(2)]

    async def add_one(connection: AsyncConnection) -> int:
        cursor: int = (await connection.execute(select(workers.c.event_cursor))).scalar_one()
        await connection.execute(update(workers).values(event_cursor=cursor + 1))
        return cursor

    seen = await asyncio.gather(*(databases[number % 2].write(add_one) for number in range(20)))

    assert sorted(seen) == list(range(20))
    for one in databases:
        await one.close()


async def test_an_unnamed_save_does_not_read_the_records_of_earlier_ones(url: str) -> None:
    """A program that saves at each step leaves thousands of tombstones; it must not slow down with them."""
    store = await open_store(url)
    asked: list[tuple[str, tuple[object, ...]]] = []

    def note(_connection: object, _cursor: object, statement: str, parameters: tuple[object, ...], *_: object) -> None:
        asked.append((statement, parameters))

    event.listen(Engine, "before_cursor_execute", note)
    try:
        await store.ephemeral_checkpoints("ada")
    finally:
        event.remove(Engine, "before_cursor_execute", note)
        await store.close()

    statement, parameters = next(one for one in asked if one[0].startswith("SELECT"))
    with contextlib.closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as file:
        plan = [row[-1] for row in file.execute(f"EXPLAIN QUERY PLAN {statement}", parameters)]
    assert "USING INDEX ix_checkpoints_unnamed" in plan[0]


async def test_readers_do_not_wait_for_a_writer(url: str) -> None:
    store = await open_store(url)
    with contextlib.closing(sqlite3.connect(url.removeprefix("sqlite:///"), isolation_level=None)) as writer:
        writer.execute("BEGIN IMMEDIATE")

        assert await store.get_session("session-1") is None

    await store.close()


async def test_the_event_loop_does_not_wait_for_a_file_that_another_process_holds(url: str) -> None:
    """A row is looked up in the loop itself, since that takes less time than telling a thread of it."""
    store = await open_store(url)
    other = sqlite3.connect(url.removeprefix("sqlite:///"), isolation_level=None)
    other.execute("PRAGMA locking_mode=EXCLUSIVE")
    other.execute("BEGIN IMMEDIATE")

    looking = asyncio.create_task(store.get_session("session-1"))
    await asyncio.sleep(0)

    assert not looking.done()
    other.close()
    assert await looking is None
    await store.close()


async def test_a_transaction_that_waits_for_something_else_fails_and_leaves_no_lock(url: str) -> None:
    """It would hold a thread, and the write lock, for as long."""
    await (await open_store(url)).close()
    database = Database(parse_store_url(url))

    async def waits(connection: AsyncConnection) -> None:
        await connection.execute(update(workers).values(event_cursor=1))
        await asyncio.sleep(0)

    with pytest.raises(RuntimeError, match="waits for something other than its connection"):
        await database.write(waits)

    await database.answers()
    await database.close()


async def test_a_file_is_migrated_under_a_lock(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes that switch a new file to WAL at once fail now and then with "database is locked"."""
    locked = []

    def look(_connection: Connection) -> None:
        with open(f"{url.removeprefix('sqlite:///')}.lock") as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        locked.append(True)

    monkeypatch.setattr(migrate, "upgrade", look)
    await (await open_store(url)).close()

    assert locked == [True]


async def test_only_its_owner_reads_the_file(url: str, tmp_path: Path) -> None:
    store = await open_store(url)
    await store.secret("urls")

    modes = {file.name: file.stat().st_mode & 0o777 for file in tmp_path.glob("store.db*") if file.suffix != ".lock"}

    await store.close()
    assert modes == {"store.db": 0o600, "store.db-wal": 0o600, "store.db-shm": 0o600}


async def test_a_path_that_cannot_be_written_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "store.db.lock").mkdir()

    with pytest.raises(StoreUnavailable, match=r"cannot be written: .*store\.db\.lock"):
        await open_store(f"sqlite:///{tmp_path}/store.db")


async def test_a_file_locked_for_too_long_is_one_clear_error(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "SQLITE_BUSY_TIMEOUT_MILLISECONDS", 0)
    store = await open_store(url)
    other = sqlite3.connect(url.removeprefix("sqlite:///"), isolation_level=None)
    try:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreUnavailable, match="database is locked"):
            await store.create_session(a_session(), None)

        other.execute("ROLLBACK")
        assert await store.create_session(a_session(), None) == a_session()
    finally:
        other.close()
        await store.close()


async def test_all_waiters_for_a_locked_file_fail_together_and_do_not_delay_a_stop(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await (await open_store(url)).close()
    monkeypatch.setattr(database, "SQLITE_BUSY_TIMEOUT_MILLISECONDS", 500)
    monkeypatch.setattr(database, "QUEUE_SECONDS", 0.5)
    store = Database(parse_store_url(url))
    other = sqlite3.connect(url.removeprefix("sqlite:///"), isolation_level=None)
    other.execute("BEGIN IMMEDIATE")

    async def nothing(connection: AsyncConnection) -> None: ...

    try:
        waiting = [asyncio.create_task(store.write(nothing)) for _ in range(20)]
        async with asyncio.timeout(5):  # one after the other they would wait for 10 s
            told = await asyncio.gather(*waiting, return_exceptions=True)
            assert {type(error) for error in told} == {StoreUnavailable}
    finally:
        other.close()
        await store.close()
