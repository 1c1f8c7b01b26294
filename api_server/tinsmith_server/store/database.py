"""Connections and transactions: the one place that knows how SQLite and PostgreSQL differ."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Literal

from sqlalchemy import URL, Engine, event
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError, NotSupportedError, ProgrammingError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from tinsmith_server.store.columns import to_json
from tinsmith_server.store.errors import RowRefused, StoreUnavailable
from tinsmith_server.store.url import async_url, describe

# FULL, not WAL's usual NORMAL: an acknowledged create_model must survive the loss of power.
_SQLITE_PRAGMAS = ("busy_timeout=30000", "synchronous=FULL", "foreign_keys=ON")

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
    """Opens transactions. On SQLite readers never wait, and this process's writers queue for one connection."""

    def __init__(self, url: URL) -> None:
        self._where = describe(url)
        if url.drivername == "sqlite":
            self._reader = _sqlite_engine(url, begin="BEGIN", pool_size=4)
            self._writer = _sqlite_engine(url, begin="BEGIN IMMEDIATE", pool_size=1)
        else:
            self._reader = self._writer = _postgresql_engine(url)

    @asynccontextmanager
    async def read(self) -> AsyncIterator[AsyncConnection]:
        """A transaction that only reads."""
        with clear_errors(self._where):
            async with self._reader.begin() as connection:
                yield connection

    @asynccontextmanager
    async def write(self) -> AsyncIterator[AsyncConnection]:
        """A transaction that may write. It is durable when the block has ended."""
        with clear_errors(self._where):
            async with self._writer.begin() as connection:
                yield connection

    async def close(self) -> None:
        await self._reader.dispose()
        if self._writer is not self._reader:
            await self._writer.dispose()


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

    def set_pragmas(connection: Any, _record: object) -> None:
        cursor = connection.cursor()
        for pragma in (*_SQLITE_PRAGMAS, *more_pragmas):
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()

    event.listen(engine, "connect", set_pragmas)
    event.listen(engine, "begin", lambda connection: connection.exec_driver_sql(begin))


# sqlite3 must not open transactions by itself: `prepare_sqlite` does.
SQLITE_CONNECT_ARGS: dict[str, Any] = {"isolation_level": None}

# What the statements are written for, whatever the database's own default: after waiting for a lock or
# for another's insert, the next statement sees what the other committed.
POSTGRESQL_ISOLATION: Literal["READ COMMITTED"] = "READ COMMITTED"


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
