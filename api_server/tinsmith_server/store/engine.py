"""The store as the services get it: `open_store(url)`."""

from __future__ import annotations

import asyncio

from tinsmith_server.store.base import Store
from tinsmith_server.store.checkpoints import CheckpointQueries
from tinsmith_server.store.database import Database
from tinsmith_server.store.installation import GarbageQueries, InstallationQueries
from tinsmith_server.store.keys import KeyQueries
from tinsmith_server.store.leases import LeaseQueries
from tinsmith_server.store.migrate import migrate
from tinsmith_server.store.models import ModelQueries
from tinsmith_server.store.placements import PlacementQueries
from tinsmith_server.store.sampling_sessions import SamplingSessionQueries
from tinsmith_server.store.sessions import SessionQueries
from tinsmith_server.store.url import parse_store_url
from tinsmith_server.store.workers import WorkerQueries


class SqlStore(
    KeyQueries,
    SessionQueries,
    ModelQueries,
    PlacementQueries,
    WorkerQueries,
    SamplingSessionQueries,
    CheckpointQueries,
    GarbageQueries,
    InstallationQueries,
    LeaseQueries,
):
    """The store on SQLite or PostgreSQL: one base class per area, one file each."""

    async def close(self) -> None:
        await self._database.close()


async def open_store(url: str) -> SqlStore:
    """Brings the schema up to date, safely beside other processes that do the same, and opens the store.

    `url` is `sqlite:///path` or `postgresql://…`. Raises BadStoreUrl and StoreUnavailable.
    """
    parsed = parse_store_url(url)
    await asyncio.to_thread(migrate, parsed)
    return SqlStore(Database(parsed))


def _keeps_the_contract(store: SqlStore) -> Store:
    return store
