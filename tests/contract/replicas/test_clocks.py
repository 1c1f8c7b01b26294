"""Replicas go by their database's clock, however far their own clocks are from it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest
from support.server.fake_fleet import FakeFleet
from support.server.http_server import TestedServer, Time, client_of, settings_for
from support.server.postgres import PostgresServer
from tinsmith_server.app import create_app

HOUR = 3600
HOURS_AHEAD = 3
NEAR = timedelta(minutes=10)


@pytest.fixture
async def server(
    postgres_server: PostgresServer, postgres_url: str, tmp_path: Path, fleet: FakeFleet
) -> AsyncIterator[TestedServer]:
    """Return a server without a clock of the test's own. The database's is hours ahead of this machine's."""
    url = postgres_server.with_fast_clock(postgres_url, HOURS_AHEAD)
    app = create_app(settings_for(tmp_path, database_url=url), fleet)
    fleet.keep_checkpoints(tmp_path / "checkpoints")
    async with app.router.lifespan_context(app), client_of(httpx.ASGITransport(app)) as client:
        yield TestedServer(app, client, fleet, Time())


def is_now_in_the_database(time: datetime) -> bool:
    return abs(time - datetime.now(UTC) - timedelta(hours=HOURS_AHEAD)) < NEAR


async def test_signs_of_life_and_silence_are_counted_by_the_databases_clock(server: TestedServer) -> None:
    """A replica whose own clock is behind would otherwise note them hours before the one that compares them."""
    session_id = await server.session()
    await server.services.background.reap_now()
    session = await server.services.sessions.owned("default", session_id)
    assert session.finished_at is None
    assert is_now_in_the_database(session.last_heartbeat_at)


async def test_a_checkpoint_expires_by_the_databases_clock_and_not_by_its_workers(
    server: TestedServer,
) -> None:
    model_id = await server.model()
    assert "path" in await server.outcome(await server.save(model_id, 1, "ck", ttl_seconds=HOUR))
    [checkpoint] = (await server.client.get(f"/training_runs/{model_id}/checkpoints")).json()["checkpoints"]
    expires = datetime.fromisoformat(checkpoint["expires_at"])
    assert is_now_in_the_database(expires - timedelta(seconds=HOUR))
