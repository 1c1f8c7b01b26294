"""The same tests on SQLite and on PostgreSQL; `replicas` are two servers on one database."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from support.postgres import PostgresServer, postgres_server
from tinsmith_server.store.base import Store
from tinsmith_server.store.engine import open_store


@pytest.fixture(scope="session", name="postgres_server")
def _postgres_server() -> Iterator[PostgresServer]:
    with postgres_server() as server:
        yield server


@pytest.fixture
def postgres_url(postgres_server: PostgresServer) -> Iterator[str]:
    """An empty schema of its own."""
    url = postgres_server.create_schema()
    yield url
    postgres_server.drop_schema(url)


@pytest.fixture(params=["sqlite", "postgresql"])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/store.db"
    url: str = request.getfixturevalue("postgres_url")
    return url


@pytest.fixture
async def store(store_url: str) -> AsyncIterator[Store]:
    store = await open_store(store_url)
    yield store
    await store.close()


@pytest.fixture
async def replicas(store_url: str) -> AsyncIterator[tuple[Store, Store]]:
    first, second = await open_store(store_url), await open_store(store_url)
    yield first, second
    await first.close()
    await second.close()
