"""A connection goes where its target is, also when that has moved while it held."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support.certificates import CLIENT, Authority, mount_secret
from support.server.operator_stand_in import API_SERVER_NAME
from tinsmith_server.errors import HandleClosed
from tinsmith_server.fleet.channels import TlsDirectory
from tinsmith_server.fleet.kubernetes.connector import Connector

PATIENCE_SECONDS = 20.0


class Client:
    """A connection that never breaks by itself, as to a machine that vanished."""

    def __init__(self, target: str, _tls: object) -> None:
        self.target = target
        self.closed = False
        self.grace_seconds: float | None = None

    async def until_broken(self) -> None:
        await asyncio.Event().wait()

    async def close(self, grace_seconds: float | None = None) -> None:
        self.grace_seconds = grace_seconds
        if grace_seconds is not None:
            await asyncio.Event().wait()  # while calls are under way
        self.closed = True


class Place:
    """The address of the other end."""

    target: str | None = "10.0.0.1:7443"


async def greet(_client: object) -> None: ...


@pytest.fixture
def place() -> Place:
    return Place()


@pytest.fixture
async def connector(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Connector]:
    monkeypatch.setattr("tinsmith_server.fleet.kubernetes.connector.GrpcWorkerClient", Client)
    authority = Authority()
    mount_secret(tmp_path, authority.leaf(API_SERVER_NAME, usages=(CLIENT,)), authority)
    connector = Connector("tiny", "uid-1", TlsDirectory(tmp_path), lambda: place.target, greet)
    yield connector
    await connector.close()


async def test_a_target_that_moves_is_followed_at_once(connector: Connector, place: Place) -> None:
    first = await connector.connection(PATIENCE_SECONDS)
    place.target = "10.0.0.2:7443"
    connector.note_change()
    async with asyncio.timeout(PATIENCE_SECONDS / 4):
        while (second := await connector.connection(PATIENCE_SECONDS)) is first:
            await asyncio.sleep(0.001)
    assert (first.closed, second.target) == (True, "10.0.0.2:7443")  # type: ignore[union-attr]


async def test_a_working_connection_is_kept_while_the_workers_address_is_unknown(
    connector: Connector, place: Place
) -> None:
    """A worker that is not ready for a moment is still the same one."""
    first = await connector.connection(PATIENCE_SECONDS)
    place.target = None
    connector.note_change()
    for _ in range(10):
        await asyncio.sleep(0.001)
    assert connector.client is first


async def test_a_wait_for_a_connection_ends_when_the_handle_is_given_up(tmp_path: Path) -> None:
    connector = Connector("tiny", "uid-1", TlsDirectory(tmp_path), lambda: None, greet)
    waiting = asyncio.create_task(connector.connection(PATIENCE_SECONDS))
    await asyncio.sleep(0)
    async with asyncio.timeout(PATIENCE_SECONDS / 4):
        await connector.close()
        with pytest.raises(HandleClosed, match="tiny is closed"):
            await waiting
        with pytest.raises(HandleClosed):
            await connector.connection(PATIENCE_SECONDS)


async def test_a_renewed_certificate_ends_no_call_that_is_under_way(
    connector: Connector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers are streamed over it, and adapters imported for minutes."""
    monkeypatch.setattr("tinsmith_server.fleet.kubernetes.connector.CERTIFICATE_CHECK_SECONDS", 0.001)
    first = await connector.connection(PATIENCE_SECONDS)
    connector.note_change()
    authority = Authority()
    mount_secret(tmp_path, authority.leaf(API_SERVER_NAME, usages=(CLIENT,)), authority)
    async with asyncio.timeout(PATIENCE_SECONDS):
        while (second := await connector.connection(PATIENCE_SECONDS)) is first:
            await asyncio.sleep(0.001)
    assert (first.closed, first.grace_seconds) == (False, 600.0)  # type: ignore[union-attr]
    await connector.close()
    assert [one.closed for one in (first, second)] == [True, True]  # type: ignore[union-attr]
