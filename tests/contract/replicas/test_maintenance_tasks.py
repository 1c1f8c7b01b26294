"""Maintenance tasks have one owner at a time, and another one soon after that one died."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest
from support.server.fake_fleet import FakeFleet
from support.server.http_server import SharedFleet, TestedServer, running_server
from tinsmith_server.fleet.base import WorkerHandle
from tinsmith_server.services.background.leases import LEASE_SECONDS, RENEW_SECONDS, Leases
from tinsmith_server.settings import Settings
from typing_extensions import override

# Leases as short as tests are patient; the real ones are compared with the promise below.
SHORT_LEASE_SECONDS = 1.0
PATIENCE_SECONDS = 20.0


@pytest.fixture
def short_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tinsmith_server.services.background.leases.LEASE_SECONDS", SHORT_LEASE_SECONDS)
    monkeypatch.setattr("tinsmith_server.services.background.leases.RENEW_SECONDS", SHORT_LEASE_SECONDS / 5)


@asynccontextmanager
async def dying_server(
    settings: Settings, fleet: FakeFleet, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[TestedServer]:
    """Run a server that releases nothing at its end."""

    async def die(_leases: Leases) -> None: ...

    async with running_server(settings, SharedFleet(fleet)) as server:
        yield server
        monkeypatch.setattr(Leases, "leave", die)


async def until_listed(server: TestedServer, model_id: str) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (await server.client.get(f"/training_runs/{model_id}/checkpoints")).json()["checkpoints"]:
        assert time.monotonic() < deadline, "no replica followed the worker"
        await asyncio.sleep(0.05)


def test_a_task_has_a_new_owner_within_20_seconds_of_a_kill() -> None:
    assert LEASE_SECONDS + RENEW_SECONDS <= 20
    assert LEASE_SECONDS >= 3 * RENEW_SECONDS, "a renewal or two may fail"


@pytest.mark.usefixtures("short_leases")
async def test_events_of_a_worker_reach_the_store_after_its_replica_has_died(
    settings: Settings, fleet: FakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No client polls for the save, whichever of the two followed the worker before."""
    async with running_server(settings, fleet) as survivor:
        async with dying_server(settings, fleet, monkeypatch) as dying:
            await asyncio.sleep(SHORT_LEASE_SECONDS)
            model_id = await dying.model()
        await survivor.save(model_id, 1, "a")
        await until_listed(survivor, model_id)


@pytest.mark.usefixtures("short_leases")
async def test_a_clean_stop_hands_everything_over_before_any_lease_is_over(
    settings: Settings, fleet: FakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinsmith_server.services.background.leases.LEASE_SECONDS", 600.0)
    async with running_server(settings, fleet) as survivor:
        async with running_server(settings, SharedFleet(fleet)) as stopping:
            await asyncio.sleep(SHORT_LEASE_SECONDS)
            model_id = await stopping.model()
        await survivor.save(model_id, 1, "a")
        await until_listed(survivor, model_id)


class MistakenFleet(FakeFleet):
    """A fleet whose list of workers raises an error of ours, until it is repaired."""

    def __init__(self) -> None:
        super().__init__()
        self.mended = False
        self.failed_attempts = 0

    @property
    @override
    def workers(self) -> Sequence[WorkerHandle]:
        if not self.mended:
            self.failed_attempts += 1
            raise RuntimeError("an unexpected failure")
        return super().workers


async def test_workers_are_followed_though_asking_for_them_has_failed(settings: Settings) -> None:
    fleet = MistakenFleet()
    async with running_server(settings, fleet) as server:
        model_id = await server.model()
        assert fleet.failed_attempts
        fleet.mended = True
        await server.save(model_id, 1, "a")
        await until_listed(server, model_id)
    fleet.cleanup()
