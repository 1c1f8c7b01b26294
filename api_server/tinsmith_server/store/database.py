"""Connections and transactions: the one place that knows how SQLite and PostgreSQL differ."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, TypeAlias, TypeVar

from sqlalchemy import URL, Engine, event
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError, NotSupportedError, ProgrammingError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from tinsmith_server.store.columns import to_json
from tinsmith_server.store.errors import RowRefused, StoreUnavailable
from tinsmith_server.store.url import async_url, describe

T = TypeVar("T")
Work: TypeAlias = Callable[[AsyncConnection], Awaitable[T]]

# Above any burst of small transactions, below the time after which a request has lost its client.
SQLITE_BUSY_TIMEOUT_MILLISECONDS = 30_000

# sqlite3 must not open transactions by itself: `prepare_sqlite` does.
SQLITE_CONNECT_ARGS: dict[str, Any] = {"isolation_level": None}

# What the statements are written for, whatever the database's own default: after waiting for a lock or
# for another's insert, the next statement sees what the other committed.
POSTGRESQL_ISOLATION: Literal["READ COMMITTED"] = "READ COMMITTED"

# A replica whose database host vanished without a word must notice within half a minute, not after the
# kernel's two hours.
_LIBPQ_DEFAULTS = {
    "application_name": "tinsmith",
    "connect_timeout": "10",
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "tcp_user_timeout": "30000",
}


class Database:
    """Runs transactions. On SQLite readers never wait, and this process's writers queue for one connection.

    A transaction runs to its end even when its caller is cancelled: a driver that is interrupted between
    two steps can leave a connection, and on SQLite the write lock, to whenever an exception is collected.
    """

    def __init__(self, url: URL) -> None:
        self._where = describe(url)
        self._running: set[asyncio.Task[Any]] = set()
        if url.drivername == "sqlite":
            self._reader = _sqlite_engine(url, begin="BEGIN", pool_size=4)
            self._writer = _sqlite_engine(url, begin="BEGIN IMMEDIATE", pool_size=1)
        else:
            self._reader = self._writer = _postgresql_engine(url)

    async def read(self, work: Work[T]) -> T:
        """Runs `work` in a transaction that only reads."""
        return await self._run(self._reader, work)

    async def write(self, work: Work[T]) -> T:
        """Runs `work` in a transaction that may write, and returns when it is durable."""
        return await self._run(self._writer, work)

    async def close(self) -> None:
        """Waits for the transactions of cancelled callers, then closes every connection."""
        await asyncio.gather(*self._running, return_exceptions=True)
        await self._reader.dispose()
        await self._writer.dispose()

    async def _run(self, engine: AsyncEngine, work: Work[T]) -> T:
        task = asyncio.create_task(self._transaction(engine, work))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return await asyncio.shield(task)

    async def _transaction(self, engine: AsyncEngine, work: Work[T]) -> T:
        with clear_errors(self._where):
            async with engine.begin() as connection:
                return await work(connection)


@contextmanager
def clear_errors(where: str) -> Iterator[None]:
    """Turns the driver's errors into the store's. Wrong SQL stays what it is: a mistake of ours."""
    try:
        yield
    except IntegrityError as error:
        raise RowRefused(f"The store at {where} refused a row: {error.orig}") from error
    except (ProgrammingError, DataError, NotSupportedError):
        raise
    except (DBAPIError, PoolTimeout) as error:
        cause = error.orig if isinstance(error, DBAPIError) else error
        raise StoreUnavailable(f"The store at {where} is not available: {cause}") from error


def prepare_sqlite(engine: Engine, begin: str, *more_pragmas: str) -> None:
    """Sets pragmas on each connection and `begin` as the statement that opens a transaction.

    BEGIN IMMEDIATE takes the write lock at once: a transaction that reads first and writes later would
    fail with "database is locked", without waiting, when another one wrote in between.
    """

    pragmas = (
        f"busy_timeout={SQLITE_BUSY_TIMEOUT_MILLISECONDS}",
        "foreign_keys=ON",
        "synchronous=FULL",  # not WAL's usual NORMAL: an acknowledged create_model must survive the loss of power
        *more_pragmas,
    )

    def set_pragmas(connection: Any, _record: object) -> None:
        cursor = connection.cursor()
        for pragma in pragmas:
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()

    event.listen(engine, "connect", set_pragmas)
    event.listen(engine, "begin", lambda connection: connection.exec_driver_sql(begin))


def postgresql_connect_args(url: URL) -> dict[str, Any]:
    """libpq parameters that the URL does not set itself."""
    return {name: value for name, value in _LIBPQ_DEFAULTS.items() if name not in url.query}


def _sqlite_engine(url: URL, begin: str, pool_size: int) -> AsyncEngine:
    engine = create_async_engine(
        async_url(url),
        pool_size=pool_size,
        max_overflow=0,
        json_serializer=to_json,
        connect_args=SQLITE_CONNECT_ARGS,
    )
    prepare_sqlite(engine.sync_engine, begin)
    return engine


def _postgresql_engine(url: URL) -> AsyncEngine:
    return create_async_engine(
        async_url(url),
        pool_size=8,
        max_overflow=8,
        pool_pre_ping=True,  # a connection that died with a restarted database is replaced, not reported
        isolation_level=POSTGRESQL_ISOLATION,
        json_serializer=to_json,
        connect_args=postgresql_connect_args(url),
    )
