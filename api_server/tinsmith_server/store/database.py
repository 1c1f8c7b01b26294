"""Connections and transactions, and the differences between SQLite and PostgreSQL."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from functools import cache, partial
from typing import Any, Literal, TypeAlias, TypeVar, cast

from sqlalchemy import (
    URL,
    Connection,
    CursorResult,
    Dialect,
    Engine,
    Executable,
    PoolProxiedConnection,
    QueuePool,
    ScalarResult,
    Select,
    create_engine,
    event,
    func,
    select,
)
from sqlalchemy.dialects import sqlite
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError, NotSupportedError, ProgrammingError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.util import LRUCache
from typing_extensions import override

from tinsmith_server.store.columns import to_json
from tinsmith_server.store.connection import (
    RowRefused,
    StoreReadOnly,
    StoreUnavailable,
    StoreUnreached,
    describe,
    driver_url,
)

T = TypeVar("T")
Isolation: TypeAlias = Literal["READ COMMITTED", "AUTOCOMMIT"]
Work: TypeAlias = Callable[[AsyncConnection], Coroutine[Any, Any, T]]

# This time is longer than any burst of small transactions, and shorter than the time for which a client waits.
SQLITE_BUSY_TIMEOUT_MILLISECONDS = 30_000

# The longest wait for other transactions of this process.
QUEUE_SECONDS = 30.0

SQLITE_READERS = 4
# The number is small, because each connection needs a process of the database.
POSTGRESQL_READERS = 10
POSTGRESQL_WRITERS = 6

# The store has fewer queries than this. The limit keeps queries that grow with their arguments from filling the memory.
COMPILED_STATEMENTS = 500

# The name of the one parameter in a statement of `look_up_value`.
KEY = "key"

# sqlite3 must not open transactions by itself: `prepare_sqlite` does.
SQLITE_CONNECT_ARGS: dict[str, Any] = {"isolation_level": None}

# The statements require this level, whatever the database's default is. With it, after a wait for a lock or for another
# insert, the next statement sees the other transaction's changes.
POSTGRESQL_ISOLATION: Isolation = "READ COMMITTED"

# A restarted database is available within seconds. Clients that got an error immediately would all retry at the same
# time.
PATIENCE_SECONDS = 10.0
RETRY_SECONDS = 0.3

# The longest wait for one answer of a PostgreSQL server. The kernel of a frozen server still acknowledges packets, so
# neither keepalives nor tcp_user_timeout end such a wait. No statement of the store takes as long.
ANSWER_SECONDS = 20.0

READ_ONLY_SQLSTATE = "25006"
READ_ONLY = (
    "its server accepts no writes: it is a standby, or default_transaction_read_only is on; "
    "point database_url at the primary"
)

# A replica whose database host vanished must notice within half a minute, not after the kernel's two hours.
_LIBPQ_DEFAULTS = {
    "application_name": "tinsmith",
    # After a fail-over the old address may lead to a standby, which answers and accepts no writes.
    "target_session_attrs": "read-write",
    "connect_timeout": "10",
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "tcp_user_timeout": "30000",
}


# A replica whose host vanished, or that was frozen, in the middle of a transaction keeps its locks until PostgreSQL
# ends it; waiting transactions give up sooner than a client does.
_LIMITS = {
    "idle_in_transaction_session_timeout": "15s",
    "lock_timeout": "10s",
    "tcp_keepalives_idle": "10",
    "tcp_keepalives_interval": "5",
    "tcp_keepalives_count": "3",
}


# After the commit of its rows, an event is acknowledged to its worker, which then deletes it. So a commit must be
# durable, although some databases are configured otherwise. Other values concern standbys, and remain the
# administrator's choice.
_DURABLE = "SELECT set_config('synchronous_commit', 'on', false) WHERE current_setting('synchronous_commit') = 'off'"


class Database:
    """A database that runs transactions. Readers and writers use separate connections, and SQLite has only one writer.

    If no connection is free, a transaction waits for at most QUEUE_SECONDS. If a PostgreSQL server accepts no
    connections, transactions wait for at most PATIENCE_SECONDS. If the server does not answer, a statement waits for at
    most ANSWER_SECONDS. After a connection is lost, only reads are repeated. A write runs to its end even if its caller
    is cancelled.
    """

    def __init__(self, url: URL) -> None:
        self._where = describe(url)
        self._is_closed = False
        self._running: set[asyncio.Task[Any]] = set()
        self._reader: ThreadedEngine
        self._writer: ThreadedEngine
        self._inline: Engine | None = None
        self._driver: PoolProxiedConnection | None = None
        # A missing file does not reappear by itself, so a retry has no use.
        self._patience_seconds = 0.0 if url.drivername == "sqlite" else PATIENCE_SECONDS
        if url.drivername == "sqlite":
            self._reader = ThreadedEngine(_sqlite_engine(url, SQLITE_READERS), SQLITE_READERS, QUEUE_SECONDS)
            self._writer = ThreadedEngine(_sqlite_engine(url, 1, begin="BEGIN IMMEDIATE"), 1, QUEUE_SECONDS)
            # One connection for `look_up`, and one for `look_up_value`.
            self._inline = _sqlite_engine(url, 2, patient=False)
        else:
            self._reader = ThreadedEngine(_postgresql_reader(url), POSTGRESQL_READERS, QUEUE_SECONDS)
            self._writer = ThreadedEngine(_postgresql_writer(url), POSTGRESQL_WRITERS, QUEUE_SECONDS)

    async def read(self, work: Work[T]) -> T:
        """Run `work`, which must only read. `work` may run several times.

        Each statement sees all transactions that were committed before the statement.
        """
        self._check_open()
        return await self._patiently(self._reader, work, StoreUnavailable)

    async def look_up(self, work: Work[T]) -> T:
        """Run `work` as `read` does. `work` must read one row by its key.

        On SQLite, the read uses no thread, because a thread would take longer than the read.

        If another process repairs or locks the file, the read is repeated in a thread.
        """
        self._check_open()
        if self._inline is not None:
            with suppress(StoreUnavailable), translate_errors(self._where):
                return run_in_transaction(self._inline, work)
        return await self.read(work)

    async def look_up_value(self, statement: Select[tuple[T]], key: str) -> T | None:
        """Return the only column of the row with this key, or None.

        `statement` has the parameter KEY. Use this method for values that are read hundreds of times a second. On
        SQLite, this method calls the driver directly, which is 20 times faster than SQLAlchemy.
        """
        self._check_open()
        if self._inline is not None:
            with suppress(sqlite3.Error, DBAPIError):
                return self._value_inline(self._inline, statement, key)
        return await self.look_up(lambda connection: connection.scalar(statement, {KEY: key}))

    def _value_inline(self, inline: Engine, statement: Select[tuple[T]], key: str) -> T | None:
        self._driver = self._driver or inline.raw_connection()
        with closing(self._driver.cursor()) as cursor:
            # All rows are fetched, because an unfinished statement would keep its old snapshot open.
            rows = cursor.execute(_text_for(statement), (key,)).fetchall()
        return rows[0][0] if rows else None

    async def write(self, work: Work[T]) -> T:
        """Run `work` in a transaction that may write. Return when the transaction is durable."""
        self._check_open()
        return await self._run(self._patiently(self._writer, work, StoreUnreached))

    async def answers(self) -> None:
        """Return when the database has answered that it accepts writes. The database is asked only once.

        Raises StoreUnavailable.
        """
        if await self._transaction(self._writer, _is_read_only):
            self._drop_idle_connections()
            raise StoreUnavailable(_unavailable(self._where, READ_ONLY))

    def _drop_idle_connections(self) -> None:
        """Close idle connections to a server that accepts no writes. Busy connections are closed when they become idle.

        Behind a proxy, idle connections would stay connected to the old server as long as the proxy keeps them open.
        """
        self._reader.drop_idle_connections()
        self._writer.drop_idle_connections()

    async def close(self) -> None:
        """Wait for the transactions of cancelled callers, then close all connections.

        Later calls raise StoreUnavailable.
        """
        self._is_closed = True
        await asyncio.gather(*self._running, return_exceptions=True)
        await self._reader.dispose()
        await self._writer.dispose()
        if self._driver is not None:
            self._driver.close()
        if self._inline is not None:
            self._inline.dispose()

    def _check_open(self) -> None:
        """Raise StoreUnavailable after `close`, for example in a request that uvicorn no longer waits for."""
        if self._is_closed:
            raise StoreUnavailable(f"The store at {self._where} is closed, since the server is stopping.")

    async def _run(self, transaction: Coroutine[Any, Any, T]) -> T:
        task = asyncio.create_task(transaction)
        self._running.add(task)
        task.add_done_callback(self._forget)
        return await asyncio.shield(task)

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            # The caller may have ended. Its failure must then not be logged as an exception that was never retrieved.
            task.exception()

    async def _patiently(self, engine: ThreadedEngine, work: Work[T], repeated: type[StoreUnavailable]) -> T:
        """Repeat the transaction after each failure of the type `repeated`, until patience ends."""
        clock = asyncio.get_running_loop().time
        until = clock() + self._patience_seconds
        while True:
            try:
                return await self._transaction(engine, work)
            except repeated as error:
                if isinstance(error, StoreReadOnly):
                    self._drop_idle_connections()
                if clock() >= until:
                    raise
                await asyncio.sleep(RETRY_SECONDS)

    async def _transaction(self, engine: ThreadedEngine, work: Work[T]) -> T:
        with translate_errors(self._where):
            return await engine.run(work)


@cache
def _text_for(statement: Select[Any]) -> str:
    """Return the text of the statement for SQLite.

    Each statement is compiled once, because compiling takes longer than the query.
    """
    return str(statement.compile(dialect=sqlite.dialect()))


@contextmanager
def translate_errors(where: str) -> Iterator[None]:
    """Translate the driver's errors. An error in the SQL is not translated, because such an error is a bug."""
    try:
        yield
    except IntegrityError as error:
        raise RowRefused(f"The store at {where} refused a row: {error.orig}") from error
    except (ProgrammingError, DataError, NotSupportedError):
        raise
    except NotConnected as error:
        raise StoreUnreached(_unavailable(where, error.reason)) from error
    except (DBAPIError, PoolTimeout) as error:
        if getattr(getattr(error, "orig", None), "sqlstate", None) == READ_ONLY_SQLSTATE:
            raise StoreReadOnly(_unavailable(where, READ_ONLY)) from error
        raise StoreUnavailable(_unavailable(where, error)) from error


def _unavailable(where: str, error: Exception | str) -> str:
    return f"The store at {where} is not available: {error.orig if isinstance(error, DBAPIError) else error}"


async def _is_read_only(connection: AsyncConnection) -> bool:
    """Return whether the server accepts no writes. The server may be a standby, or a primary that refuses writes.

    A read-only SQLite file has already refused BEGIN IMMEDIATE.
    """
    if connection.dialect.name == "sqlite":
        await connection.execute(select(1))
        return False
    return bool(await connection.scalar(select(func.current_setting("transaction_read_only") == "on")))


def prepare_sqlite(engine: Engine, begin: str | None, *more_pragmas: str, patient: bool = True) -> None:
    """Set pragmas on each connection. If `begin` is given, use this statement to open transactions.

    A connection that is not `patient` does not wait for locks. BEGIN IMMEDIATE takes the write lock immediately.
    Without BEGIN IMMEDIATE, a transaction that reads first and then writes would fail with "database is locked" if
    another transaction wrote in between.
    """

    pragmas = (
        # This comes first, since the others read the file.
        f"busy_timeout={SQLITE_BUSY_TIMEOUT_MILLISECONDS if patient else 0}",
        "foreign_keys=ON",
        "synchronous=FULL",  # not NORMAL: an acknowledged create_model must survive a power loss
        *more_pragmas,
    )

    def set_pragmas(connection: Any, _record: object) -> None:
        cursor = connection.cursor()
        for pragma in pragmas:
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()

    event.listen(engine, "connect", set_pragmas)
    if begin is not None:
        event.listen(engine, "begin", lambda connection: connection.exec_driver_sql(begin))


def postgresql_connect_args(url: URL) -> dict[str, Any]:
    """Return the libpq parameters that the URL itself does not set."""
    return {name: value for name, value in _LIBPQ_DEFAULTS.items() if name not in url.query}


def _prepare_writer(connection: Any, _record: object) -> None:
    cursor = connection.cursor()
    for name, value in _LIMITS.items():
        cursor.execute(f"SET {name} = '{value}'")
    cursor.execute(_DURABLE)
    cursor.close()
    connection.commit()


def _sqlite_engine(url: URL, pool_size: int, begin: str | None = None, *, patient: bool = True) -> Engine:
    dialect, compiled = _sqlite_dialect()
    where, how = dialect.create_connect_args(driver_url(url))
    connect = partial(dialect.connect, *where, **{**how, **SQLITE_CONNECT_ARGS})
    pool = QueuePool(connect, pool_size, max_overflow=0, dialect=dialect)
    engine = Engine(pool, dialect, driver_url(url), execution_options={"compiled_cache": compiled})
    prepare_sqlite(engine, begin, patient=patient)
    return engine


@cache
def _sqlite_dialect() -> tuple[Dialect, LRUCache[Any, Any]]:
    """Return SQLite's dialect with its compiled statements. All engines of the process share this dialect.

    `create_engine` creates a dialect for each engine, and each dialect would compile every statement again. The
    compilation of a statement takes 2 to 10 ms of CPU.
    """
    engine = create_engine(driver_url(URL.create("sqlite")), json_serializer=to_json)
    engine.connect().close()  # the dialect asks the library for its version
    engine.dispose()
    return engine.dialect, LRUCache(COMPILED_STATEMENTS)


def _postgresql_reader(url: URL) -> Engine:
    """Return an engine for single statements without transactions.

    The engine repeats a statement if the connection is stale. Without transactions, each statement takes one round trip
    instead of four.
    """
    return _postgresql_engine(url, "AUTOCOMMIT", pool_size=POSTGRESQL_READERS, pool_pre_ping=False)


def _postgresql_writer(url: URL) -> Engine:
    """Return an engine that replaces connections that were lost when the database restarted."""
    engine = _postgresql_engine(url, POSTGRESQL_ISOLATION, pool_size=POSTGRESQL_WRITERS, pool_pre_ping=True)
    event.listen(engine, "connect", _prepare_writer)
    return engine


def _postgresql_engine(url: URL, isolation_level: Isolation, *, pool_size: int, pool_pre_ping: bool) -> Engine:
    engine = create_engine(
        driver_url(url),
        pool_size=pool_size,
        max_overflow=0,
        pool_pre_ping=pool_pre_ping,
        isolation_level=isolation_level,
        json_serializer=to_json,
        connect_args=postgresql_connect_args(url),
    )
    event.listen(engine, "do_connect", _connect_with_limit)
    return engine


def _connect_with_limit(_dialect: Dialect, _record: object, where: Any, how: Any) -> Any:
    return _limited_connection().connect(*where, **how)


@cache
def _limited_connection() -> Any:
    """Return the class of connections that wait for an answer for at most ANSWER_SECONDS, and close themselves then.

    psycopg is imported here, because a server with SQLite does not need it.
    """
    import psycopg

    class LimitedConnection(psycopg.Connection[Any]):
        @override
        def wait(self, gen: Any, interval: float = 0.1, timeout: float | None = None) -> Any:
            """Wait for the answer to a statement. Raises OperationalError if there is none in time."""
            limit_seconds = ANSWER_SECONDS if timeout is None else timeout
            began = time.monotonic()
            try:
                return super().wait(gen, interval, limit_seconds)
            except psycopg.OperationalError as error:
                if timeout is not None or time.monotonic() - began < limit_seconds:
                    raise
                # The server may answer later, and the connection would take this answer for that of another statement.
                self.pgconn.finish()
                raise psycopg.OperationalError(
                    f"it has not answered for {limit_seconds:g} s; check whether its process or its host is stopped"
                ) from error

    return LimitedConnection


Parameters: TypeAlias = Mapping[str, Any] | None


class NotConnected(Exception):
    """The connection could not be opened. `reason` is the driver's error."""

    def __init__(self, reason: DBAPIError) -> None:
        super().__init__(str(reason))
        self.reason = reason


class ThreadedEngine:
    """An engine that has as many threads as its pool has connections.

    A transaction that waits longer than `patience_seconds` for a thread fails. Without this limit, a blocked database
    would block the waiting transactions one after another, even transactions of clients that no longer wait.
    """

    def __init__(self, engine: Engine, threads: int, patience_seconds: float) -> None:
        self._engine = engine
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="store")
        self._patience_seconds = patience_seconds

    async def run(self, work: Callable[[AsyncConnection], Coroutine[Any, Any, T]]) -> T:
        """Run `work` in a thread. Calls run in the order of arrival. `work` may wait only for its connection.

        Raises SQLAlchemy's TimeoutError, as SQLAlchemy's pools do, and NotConnected.
        """
        until = time.monotonic() + self._patience_seconds
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._run, work, until)

    def _run(self, work: Callable[[AsyncConnection], Coroutine[Any, Any, T]], until: float) -> T:
        if time.monotonic() > until:
            raise PoolTimeout(f"its transactions have waited for each other for {self._patience_seconds:g} s")
        return run_in_transaction(self._engine, work)

    def drop_idle_connections(self) -> None:
        """Close idle connections. Busy connections are closed when their transactions end."""
        self._engine.dispose()

    async def dispose(self) -> None:
        await asyncio.to_thread(self._threads.shutdown)
        self._engine.dispose()


def run_in_transaction(engine: Engine, work: Callable[[AsyncConnection], Coroutine[Any, Any, T]]) -> T:
    """Run one transaction in this thread. Raises NotConnected."""
    try:
        connected = engine.connect()
    except DBAPIError as error:
        raise NotConnected(error) from error
    with closing(connected) as connection, connection.begin():
        return _outcome(work(cast(AsyncConnection, _BlockingConnection(connection))))


class _BlockingConnection:
    """The methods of an AsyncConnection that transactions use, as blocking calls."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    @property
    def dialect(self) -> Dialect:
        return self._connection.dialect

    async def execute(self, statement: Executable, parameters: Parameters = None) -> CursorResult[Any]:
        return self._connection.execute(statement, parameters)

    async def scalar(self, statement: Executable, parameters: Parameters = None) -> Any:
        return self._connection.scalar(statement, parameters)

    async def scalars(self, statement: Executable, parameters: Parameters = None) -> ScalarResult[Any]:
        return self._connection.scalars(statement, parameters)

    async def exec_driver_sql(self, statement: str) -> CursorResult[Any]:
        return self._connection.exec_driver_sql(statement)


def _outcome(work: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine that never waits for anything."""
    try:
        work.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    work.close()
    raise RuntimeError("a transaction waits for something other than its connection")
