"""The store as the services get it: `open_store(url)`."""

from __future__ import annotations

import asyncio

from tinsmith_server.store.database import Database
from tinsmith_server.store.migrate import migrate
from tinsmith_server.store.queries.accounting import AuditQueries, UsageQueries
from tinsmith_server.store.queries.checkpoints import CheckpointQueries
from tinsmith_server.store.queries.installation import GarbageQueries, InstallationQueries, KeyQueries
from tinsmith_server.store.queries.leases import LeaseQueries
from tinsmith_server.store.queries.models import ModelQueries
from tinsmith_server.store.queries.placements import PlacementQueries
from tinsmith_server.store.queries.promotions import PromotionQueries
from tinsmith_server.store.queries.sessions import SamplingSessionQueries, SessionQueries
from tinsmith_server.store.queries.workers import WorkerQueries
from tinsmith_server.store.url import parse_store_url


class Store(
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
    UsageQueries,
    AuditQueries,
    PromotionQueries,
):
    """The store on SQLite or PostgreSQL: one base class of `store/queries` per area.

    Every method is one transaction, safe from several replicas and tasks at once. Any of them raises
    `StoreUnavailable` when the database does not answer, and `UnstorableValue` for text, numbers or times
    that no row can hold (`store/errors.py`).
    """

    async def close(self) -> None:
        await self._database.close()


async def open_store(url: str) -> Store:
    """Brings the schema up to date, safely beside other processes that do the same, and opens the store.

    `url` is `sqlite:///path` or `postgresql://…`. Raises BadStoreUrl and StoreUnavailable.
    """
    parsed = parse_store_url(url)
    await asyncio.to_thread(migrate, parsed)
    return Store(Database(parsed))
