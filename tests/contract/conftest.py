"""Databases to keep a store in: the same promises hold on both."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.server.postgres import PostgresServer, postgres_server


@pytest.fixture(scope="session", name="postgres_server")
def _postgres_server() -> Iterator[PostgresServer]:
    with postgres_server() as server:
        yield server


@pytest.fixture
def postgres_url(postgres_server: PostgresServer) -> Iterator[str]:
    """Return an empty schema of the test's own."""
    url = postgres_server.create_schema()
    yield url
    postgres_server.drop_schema(url)


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.slow("needs PostgreSQL"))])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/store.db"
    url: str = request.getfixturevalue("postgres_url")
    return url
