"""The same promises of one server, and of two that hear each other request; over fake workers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from support.server.fake_fleet import FakeFleet
from support.server.http_server import REPLICAS, TestedServer, running_server, settings_for


@pytest.fixture
def fleet() -> Iterator[FakeFleet]:
    fleet = FakeFleet()
    yield fleet
    fleet.cleanup()


@pytest.fixture(params=list(REPLICAS))
async def server(request: pytest.FixtureRequest, tmp_path: Path, fleet: FakeFleet) -> AsyncIterator[TestedServer]:
    async with REPLICAS[request.param](settings_for(tmp_path), fleet) as server:
        yield server


@pytest.fixture
async def hasty_server(tmp_path: Path, fleet: FakeFleet) -> AsyncIterator[TestedServer]:
    """Holds polls for a moment only, for tests of what comes after the hold."""
    async with running_server(settings_for(tmp_path, poll_hold_seconds=0.1), fleet) as server:
        yield server
