"""Two servers on one PostgreSQL, over fake workers that both of them reach."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from support.server.fake_fleet import FakeFleet
from support.server.http_server import TestedServer, running_servers, settings_for
from tinsmith_server.settings import Settings


@pytest.fixture
def fleet() -> Iterator[FakeFleet]:
    fleet = FakeFleet()
    yield fleet
    fleet.cleanup()


@pytest.fixture
def settings(tmp_path: Path, postgres_url: str) -> Settings:
    return settings_for(tmp_path, database_url=postgres_url)


@pytest.fixture
async def replicas(settings: Settings, fleet: FakeFleet) -> AsyncIterator[tuple[TestedServer, TestedServer]]:
    async with running_servers(settings, fleet) as servers:
        yield servers
