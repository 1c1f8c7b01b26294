"""One server for all attacks: what one of them breaks, the next one would see."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from support.server.attacked_server import AttackedServer
from support.server.fake_fleet import FakeFleet
from support.server.http_server import TestedServer, running_server, settings_for


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AttackedServer]:
    server = AttackedServer.start(
        tmp_path_factory.mktemp("attacked"), connections_per_address="300", adapter_slots="1000"
    )
    yield server
    assert server.installation.stop() == 0


@pytest.fixture
async def installation(tmp_path: Path) -> AsyncIterator[TestedServer]:
    """Return the application in this process, for event-loop counts and for requests that no client would send."""
    fleet = FakeFleet()
    try:
        async with running_server(settings_for(tmp_path), fleet) as server:
            yield server
    finally:
        fleet.cleanup()
