"""The store that the services use, and the clock of its database."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime, timedelta

from tinsmith_server.logs import get_logger
from tinsmith_server.store.connection import StoreError, parse_store_url
from tinsmith_server.store.database import Database
from tinsmith_server.store.migrate import migrate
from tinsmith_server.store.queries.accounting import AuditQueries, UsageQueries
from tinsmith_server.store.queries.checkpoints import CheckpointQueries
from tinsmith_server.store.queries.deferred import DeferredQueries
from tinsmith_server.store.queries.installation import GarbageQueries, InstallationQueries
from tinsmith_server.store.queries.keys import KeyQueries
from tinsmith_server.store.queries.leases import LeaseQueries
from tinsmith_server.store.queries.models import ModelQueries, WorkerQueries
from tinsmith_server.store.queries.placements import PlacementQueries
from tinsmith_server.store.queries.promotions import PromotionQueries
from tinsmith_server.store.queries.recordings import RecordingQueries
from tinsmith_server.store.queries.runs import RunQueries
from tinsmith_server.store.queries.sessions import SamplingSessionQueries, SessionQueries
from tinsmith_server.store.queries.tenant_limits import TenantLimitQueries
from tinsmith_server.store.records import Clock


class Store(
    KeyQueries,
    TenantLimitQueries,
    SessionQueries,
    ModelQueries,
    PlacementQueries,
    DeferredQueries,
    WorkerQueries,
    SamplingSessionQueries,
    CheckpointQueries,
    GarbageQueries,
    InstallationQueries,
    LeaseQueries,
    UsageQueries,
    AuditQueries,
    PromotionQueries,
    RecordingQueries,
    RunQueries,
):
    """The store on SQLite or PostgreSQL. Each base class of `Store` is one area of `store/queries`.

    Every method is one transaction. Several replicas and tasks may use the store at the same time. Each method raises
    `StoreUnavailable` if the database does not answer, and `UnstorableValue` for text, numbers or times that no row can
    hold (`store/connection.py`).
    """

    async def close(self) -> None:
        await self._database.close()


async def open_store(url: str) -> Store:
    """Migrate the schema and open the store. Other processes may migrate at the same time.

    `url` is `sqlite:///path` or `postgresql://…`. Raises BadStoreUrl and StoreUnavailable.
    """
    parsed = parse_store_url(url)
    await asyncio.to_thread(migrate, parsed)
    return Store(Database(parsed))


log = get_logger(__name__)

READ_SECONDS = 5.0
# After a slow answer, the moment at which the database read its clock is uncertain. The last good reading is better.
SLOW_READING_SECONDS = 1.0
# This clock advances while the host sleeps, if the system has such a clock.
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class DatabaseClock:
    """The time of the database.

    The database's clock is read every few seconds, and a monotonic clock advances the time in between. The clocks of
    the replicas themselves may differ. A fast clock would end sessions that another replica keeps alive, and would
    delete checkpoints early.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._epoch: datetime | None = None

    def __call__(self) -> datetime:
        if self._epoch is None:
            raise RuntimeError("The database's clock has not been read yet.")
        return self._epoch + timedelta(seconds=time.clock_gettime(_CLOCK))

    async def read(self) -> None:
        """Read the database's clock. Raises StoreUnavailable."""
        requested_at = time.clock_gettime(_CLOCK)
        now = await self._store.now()
        answered_at = time.clock_gettime(_CLOCK)
        if self._epoch is None or answered_at - requested_at < SLOW_READING_SECONDS:
            self._epoch = now - timedelta(seconds=(requested_at + answered_at) / 2)

    async def keep(self) -> None:
        """Read the clock regularly until cancelled."""
        while True:
            await asyncio.sleep(READ_SECONDS)
            try:
                await self.read()
            except StoreError as error:
                log.warning("the database's clock was not read", reason=str(error))


@asynccontextmanager
async def database_clock(store: Store) -> AsyncIterator[Clock]:
    """Run a clock while the context is open. Raises StoreUnavailable."""
    clock = DatabaseClock(store)
    await clock.read()
    reading = asyncio.create_task(clock.keep())
    try:
        yield clock
    finally:
        reading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await reading
