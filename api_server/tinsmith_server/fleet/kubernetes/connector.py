"""A connection to a target. The connection is kept open, and is opened again after each loss.

`ConnectedHandle` gives this connection to the callers of a session's worker or of a pool's replica.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable

from tinsmith_server.errors import HandleClosed, TinsmithError, WorkerUnavailable
from tinsmith_server.fleet.channels import TlsDirectory
from tinsmith_server.fleet.client import IMPORT_TIMEOUT_SECONDS, GrpcWorkerClient
from tinsmith_server.logs import get_logger

log = get_logger(__name__)

FIRST_BACKOFF_SECONDS = 0.2
MAX_BACKOFF_SECONDS = 5.0
CERTIFICATE_CHECK_SECONDS = 10.0
# After a renewal of the certificate, the old connection stays open for as long as the longest call takes.
RENEWAL_GRACE_SECONDS = IMPORT_TIMEOUT_SECONDS

Target = Callable[[], "str | None"]
"""A function that returns the current address, or None while the target has no address."""
Greet = Callable[[GrpcWorkerClient], Awaitable[None]]
"""The handshake that must succeed before callers get the connection."""


class Connector:
    """A connection that is replaced as soon as its channel breaks. The next connection may reach another instance."""

    def __init__(self, what: str, identity: str, tls: TlsDirectory, target: Target, greet: Greet) -> None:
        """Prepare the connection.

        `what` describes the peer in logs. The peer's certificate must contain `identity`.
        """
        self._what = what
        self._identity = identity
        self._tls = tls
        self._target = target
        self._greet = greet
        self._changed = asyncio.Event()
        self._connected = asyncio.Event()
        self._client: GrpcWorkerClient | None = None
        self._closed = False
        self._retired: dict[asyncio.Task[None], GrpcWorkerClient] = {}
        self.failure = "it has not answered yet"
        self._life = asyncio.create_task(self._live(), name=f"connection to {what}", context=contextvars.Context())

    @property
    def client(self) -> GrpcWorkerClient | None:
        """The client of the open connection, or None without a connection."""
        return self._client

    def note_change(self) -> None:
        """Read the target's address again, because the address may have changed."""
        self._changed.set()

    async def connection(self, timeout_seconds: float) -> GrpcWorkerClient | None:
        """Return a client, or None at the end of the timeout.

        Raises HandleClosed, even if the handle is closed during the wait.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_seconds):
                # A new connection can be lost before a waiting task runs.
                while self._client is None and not self._closed:
                    await self._connected.wait()
        if self._closed:
            raise HandleClosed(f"the connection to {self._what} is closed; send the request again")
        return self._client

    async def close(self) -> None:
        self._closed = True
        self._life.cancel()
        retired = dict(self._retired)
        for closing in retired:
            closing.cancel()
        await asyncio.gather(self._life, *retired, return_exceptions=True)
        await asyncio.gather(*(client.close() for client in retired.values()))
        self._connected.set()

    async def _live(self) -> None:
        """Keep a connection open, and open a new connection after each loss."""
        backoff = FIRST_BACKOFF_SECONDS
        while True:
            target = await self._until_reachable()
            try:
                await self._one_connection(target)
                backoff = FIRST_BACKOFF_SECONDS
                continue
            except TinsmithError as error:
                self.failure = str(error)
            except Exception as error:
                # An unexpected error must not make this worker unreachable until a restart.
                log.exception("connection failed", to=self._what)
                self.failure = repr(error)
            await self._wait_for_change(backoff)
            backoff = min(2 * backoff, MAX_BACKOFF_SECONDS)

    async def _until_reachable(self) -> str:
        while (target := self._target()) is None:
            await self._wait_for_change(None)
        return target

    async def _wait_for_change(self, timeout_seconds: float | None) -> None:
        self._changed.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_seconds):
                await self._changed.wait()

    async def _wait_for_news(self, broken: asyncio.Task[None]) -> None:
        self._changed.clear()
        changed = asyncio.create_task(self._changed.wait())
        try:
            first = asyncio.FIRST_COMPLETED
            await asyncio.wait({broken, changed}, timeout=CERTIFICATE_CHECK_SECONDS, return_when=first)
        finally:
            changed.cancel()

    async def _one_connection(self, target: str) -> None:
        """Open one connection. Return when the connection is lost or must be replaced.

        Raises WorkerUnavailable if the connection cannot be opened.
        """
        certificate = self._tls.for_worker(self._identity)
        client = GrpcWorkerClient(target, certificate)
        is_renewed = False
        try:
            await self._greet(client)
            self._client = client
            self._connected.set()
            log.info("worker ready", worker=self._what, endpoint=target)
            broken = asyncio.create_task(client.until_broken())
            try:
                while not broken.done() and not is_renewed and self._target() in {target, None}:
                    await self._wait_for_news(broken)
                    is_renewed = not self._tls.shows(certificate)
            finally:
                broken.cancel()
            log.info("worker connection ended", worker=self._what)
        finally:
            self._connected.clear()
            self._client = None
            if is_renewed and not self._closed:
                self._retire(client)
            else:
                await client.close()

    def _retire(self, client: GrpcWorkerClient) -> None:
        """Close the client after a grace period, so that running streams and imports can end."""
        closing = asyncio.create_task(client.close(RENEWAL_GRACE_SECONDS), context=contextvars.Context())
        self._retired[closing] = client
        closing.add_done_callback(lambda closed: self._retired.pop(closed, None))


class ConnectedHandle(ABC):
    """A base class for handles that get a connection from a connector."""

    _connector: Connector

    async def connection(self, timeout_seconds: float) -> GrpcWorkerClient:
        client = await self._connector.connection(timeout_seconds)
        if client is None:
            raise self._why_not()
        return client

    def running(self) -> GrpcWorkerClient | None:
        return self._connector.client

    async def close(self) -> None:
        await self._connector.close()

    @abstractmethod
    def _why_not(self) -> WorkerUnavailable:
        """Return the error for callers while no connection is open."""


def unreachable(what: str, failure: str) -> WorkerUnavailable:
    return WorkerUnavailable(f"{what} is ready, but this server cannot reach it: {failure}")
