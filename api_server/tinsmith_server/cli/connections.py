"""uvicorn's server and HTTP protocol, with a time limit for each thing that a client may leave unfinished.

uvicorn itself waits for a header without a limit, and accepts headers of any length. uvicorn also lets one client
address use all file descriptors for its connections.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import resource
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI
from typing_extensions import override
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from tinsmith_server.app import release_polls
from tinsmith_server.logs import get_logger

log = get_logger(__name__)

# Clients keep idle connections for 90 s. This time is longer.
KEEP_ALIVE_SECONDS = 120.0
# The limit for a request's header, and for the first byte on a new connection.
HEAD_SECONDS = 10.0
# The limit for the rest of a body that was answered early, and for a client that stops reading its answer.
LINGER_SECONDS = 30.0
STALL_SECONDS = 120.0
HEAD_BYTES = 32 * 1024
HEAD_FIELDS = 100

_TOO_LARGE = f"the request's header has more than {HEAD_BYTES} bytes or {HEAD_FIELDS} fields"
_TOO_SLOW = f"the request's header did not arrive within {HEAD_SECONDS:g} s"


class Addresses:
    """The number of connections of each address.

    Connections of trusted proxies are not counted here. `AddressLimit` counts the requests on the connections of
    trusted proxies.
    """

    def __init__(self, limit: int, trusted: Sequence[str]) -> None:
        self.limit = min(limit, _open_files() // 2)
        self._trusted = [ipaddress.ip_network(network, strict=False) for network in trusted]
        self._connections: Counter[str] = Counter()

    def enter(self, address: str) -> bool:
        """Count a connection. Returns False if the address has reached the limit."""
        if self._trusts(address):
            return True
        if self._connections[address] >= self.limit:
            if self._connections[address] == self.limit:
                # The limit is logged once, until the count is below it again.
                self._connections[address] += 1
                log.warning("address has too many connections", address=address, limit=self.limit)
            return False
        self._connections[address] += 1
        return True

    def leave(self, address: str) -> None:
        """Remove a counted connection."""
        if not self._trusts(address):
            self._connections[address] = min(self._connections[address], self.limit) - 1
            if self._connections[address] <= 0:
                del self._connections[address]

    def _trusts(self, address: str) -> bool:
        try:
            return any(ipaddress.ip_address(address) in network for network in self._trusted)
        except ValueError:  # the address of a Unix socket
            return True


def _open_files() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 2**31 if soft == resource.RLIM_INFINITY else soft


class UntilClosed:
    """An application that closes the connection after an answer without a length.

    uvicorn sends an answer without a length in chunks, and HTTP/1.0 does not have chunks. By default, nginx speaks
    HTTP/1.0 to its upstreams.
    """

    def __init__(self, app: Any, cycle: RequestResponseCycle) -> None:
        self._app = app
        self._cycle = cycle

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        has_length = True

        async def unchunked(message: Any) -> None:
            nonlocal has_length
            if message["type"] == "http.response.start":
                has_length = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
                if not has_length:
                    self._cycle.chunked_encoding, self._cycle.keep_alive = False, False
            elif not has_length:
                self._cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await self._app(scope, receive, unchunked)


class BoundedProtocol(HttpToolsProtocol):
    """HTTP with one deadline at a time: for the next header, for the rest of a body, or for a slow reader.

    A request in progress has no deadline here, because the route limits the time for the body.
    """

    def __init__(self, *args: Any, addresses: Addresses, **options: Any) -> None:
        super().__init__(*args, **options)
        self._addresses = addresses
        self._address: str | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._in_head = False
        self._in_body = False
        self._refused = False
        # Bytes received, and bytes parsed.
        self._raw_bytes = 0
        self._head_bytes = 0

    # ---- connections

    @override
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        address = self.client[0] if self.client else ""
        if self._addresses.enter(address):
            self._address = address
            self._expect(HEAD_SECONDS, self._end_idle)
        else:
            self._refused = True
            transport.abort()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._expect(None)
        if self._address is not None:
            self._addresses.leave(self._address)
            self._address = None
        super().connection_lost(exc)

    def _expect(self, seconds: float | None, otherwise: Callable[[], None] | None = None) -> None:
        """Replace the current deadline."""
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = self.loop.call_later(seconds, otherwise) if seconds is not None and otherwise else None

    def _end_idle(self) -> None:
        """Close an idle connection. A connection that sends bytes but starts no request is idle, too."""
        self.transport.abort()

    # ---- headers

    @override
    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self._raw_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._raw_bytes > HEAD_BYTES:
            self._refuse(b"431 Request Header Fields Too Large", _TOO_LARGE)

    @override
    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._head_bytes, self._raw_bytes = True, 0, 0
        if self._idle:
            self._expect(HEAD_SECONDS, lambda: self._refuse(b"408 Request Timeout", _TOO_SLOW))

    @override
    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._head_bytes += len(url)

    @override
    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value) + len(b": \r\n")
        if self._head_bytes > HEAD_BYTES or len(self.headers) >= HEAD_FIELDS:
            self._refuse(b"431 Request Header Fields Too Large", _TOO_LARGE)
        elif not self._refused:
            super().on_header(name, value)

    @override
    def on_headers_complete(self) -> None:
        self._in_head, self._in_body = False, True
        if self._refused:
            return
        if self._idle:
            self._expect(None)
        super().on_headers_complete()

    @override
    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        super()._start_asgi_task(cycle, UntilClosed(app, cycle) if cycle.scope["http_version"] == "1.0" else app)

    def _refuse(self, status: bytes, sentence: str) -> None:
        """Refuse a request that has not reached the application yet."""
        if self._refused or self.transport.is_closing():
            return
        self._refused, self._in_head = True, False
        self._expect(None)
        if not self._idle:
            # An earlier request is in progress. Its answer and this refusal would be mixed.
            self.transport.abort()
            return
        body = f'{{"detail":"{sentence}"}}'.encode()
        head = b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
        self.transport.write(head % (status, len(body)) + body)
        self.transport.close()
        self._expect(LINGER_SECONDS, self.transport.abort)

    # ---- bodies and answers

    @property
    def _idle(self) -> bool:
        cycle: RequestResponseCycle | None = self.cycle
        return cycle is None or cycle.response_complete

    @override
    def on_body(self, body: bytes) -> None:
        if not self._refused:
            super().on_body(body)

    @override
    def on_message_complete(self) -> None:
        self._in_body = False
        if self._refused:
            return
        super().on_message_complete()
        if self._idle:
            # The rest of a body that was answered early.
            self._expect(KEEP_ALIVE_SECONDS, self._end_idle)

    @override
    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self._expect(LINGER_SECONDS, self.transport.abort)
        elif self._idle:
            self._expect(LINGER_SECONDS if self._in_body else KEEP_ALIVE_SECONDS, self._end_idle)

    @override
    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect(STALL_SECONDS, self.transport.abort)

    @override
    def resume_writing(self) -> None:
        super().resume_writing()
        self._expect(None)


class StoppingServer(uvicorn.Server):
    """A uvicorn server with callbacks for the start and the stop.

    The server calls `announce` when it begins to answer requests, and releases held polls before it waits for open
    connections.
    """

    def __init__(self, config: uvicorn.Config, announce: Callable[[], None]) -> None:
        super().__init__(config)
        self._announce = announce

    @override
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().startup(sockets)
        except SystemExit:
            # uvicorn logs the cause without keeping it. The application has kept the error.
            raise _application(self).state.startup_error from None
        if self.started:
            self._announce()

    @override
    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if not self.started:
            # uvicorn would wait for the end of the startup, which may wait for a database or a cluster. No request was
            # accepted yet.
            os._exit(0)
        super().handle_exit(sig, frame)

    @override
    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        release_polls(_application(self))
        await super().shutdown(sockets)


def _application(server: uvicorn.Server) -> FastAPI:
    assert isinstance(server.config.app, FastAPI)
    return server.config.app
