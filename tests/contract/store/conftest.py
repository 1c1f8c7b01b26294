"""The same tests on SQLite and on PostgreSQL; `replicas` are two servers on one database."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from support.server.empty_stores import with_schema
from tinsmith_server.store.store import Store, open_store


@pytest.fixture
async def store(store_url: str) -> AsyncIterator[Store]:
    store = await open_store(with_schema(store_url))
    yield store
    await store.close()


@pytest.fixture
async def replicas(store_url: str) -> AsyncIterator[tuple[Store, Store]]:
    first, second = await open_store(with_schema(store_url)), await open_store(store_url)
    yield first, second
    await first.close()
    await second.close()
