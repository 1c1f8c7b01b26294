"""Transactions in threads: each runs in one of them from its beginning to its end, with a driver that blocks.

As tasks of the event loop each statement, and each BEGIN and COMMIT, would wait for all that is ready there: beside a
thousand clients a transaction held its connection for seconds of turns, and who waited for one came to it in any order.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any, TypeAlias, TypeVar, cast

from sqlalchemy import Connection, CursorResult, Dialect, Engine, Executable, ScalarResult
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncConnection

T = TypeVar("T")
Parameters: TypeAlias = Mapping[str, Any] | None


class NotConnected(Exception):
    """Nothing was done. `reason` is the driver's error."""

    def __init__(self, reason: DBAPIError) -> None:
        super().__init__(str(reason))
        self.reason = reason


class ThreadedEngine:
    """Has as many threads as the engine's pool has connections, so that none waits for one.

    Who has waited for a thread for longer than `patience_seconds` has none any more: while something holds the
    database up, each transaction in turn would wait for it as long again, those of clients that are gone, too.
    """

    def __init__(self, engine: Engine, threads: int, patience_seconds: float) -> None:
        self._engine = engine
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="store")
        self._patience_seconds = patience_seconds

    async def run(self, work: Callable[[AsyncConnection], Coroutine[Any, Any, T]]) -> T:
        """Begun in the order of the calls. `work` may wait for its connection and nothing else.

        Raises SQLAlchemy's TimeoutError, as its pools do, and NotConnected.
        """
        until = time.monotonic() + self._patience_seconds
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._run, work, until)

    def _run(self, work: Callable[[AsyncConnection], Coroutine[Any, Any, T]], until: float) -> T:
        if time.monotonic() > until:
            raise PoolTimeout(f"its transactions have waited for one another for {self._patience_seconds:g} s")
        return at_once(self._engine, work)

    def connect_anew(self) -> None:
        """Close idle connections. Those of running transactions are closed when these end."""
        self._engine.dispose()

    async def dispose(self) -> None:
        await asyncio.to_thread(self._threads.shutdown)
        self._engine.dispose()


def at_once(engine: Engine, work: Callable[[AsyncConnection], Coroutine[Any, Any, T]]) -> T:
    """One transaction in this thread. Raises NotConnected."""
    try:
        connected = engine.connect()
    except DBAPIError as error:
        raise NotConnected(error) from error
    with closing(connected) as connection, connection.begin():
        return _outcome(work(cast(AsyncConnection, _AtOnce(connection))))


class _AtOnce:
    """What transactions use of an AsyncConnection, done when it is called."""

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
    """Of a coroutine that never waits."""
    try:
        work.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    work.close()
    raise RuntimeError("a transaction waits for something else than its own connection")
