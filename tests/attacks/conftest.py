"""One server for all attacks: what one of them breaks, the next one would see."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.server.attacked_server import AttackedServer


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AttackedServer]:
    server = AttackedServer.start(
        tmp_path_factory.mktemp("attacked"), connections_per_address="300", adapter_slots="1000"
    )
    yield server
    assert server.installation.stop() == 0
