"""The number of connections per address, and the end of answers on them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import uvicorn
from tinsmith_server.cli.connections import Addresses, BoundedProtocol
from uvicorn.server import ServerState


def test_an_address_has_as_many_as_it_may_and_each_that_ends_makes_room() -> None:
    addresses = Addresses(3, ())
    assert [addresses.enter("192.0.2.1") for _ in range(6)] == [True] * 3 + [False] * 3
    assert addresses.enter("192.0.2.2")
    addresses.leave("192.0.2.1")
    assert [addresses.enter("192.0.2.1") for _ in range(2)] == [True, False]
    for _ in range(3):
        addresses.leave("192.0.2.1")
    assert [addresses.enter("192.0.2.1") for _ in range(4)] == [True] * 3 + [False]


@pytest.mark.parametrize("address", ["10.1.2.3", "2001:db8::7", ""])
def test_connections_of_a_trusted_proxy_say_nothing(address: str) -> None:
    addresses = Addresses(1, ("10.0.0.0/8", "2001:db8::7"))
    assert all(addresses.enter(address) for _ in range(5))
    addresses.leave(address)


async def streaming(scope: Any, _receive: Any, send: Any) -> None:
    """Answers `/whole` with a length, and any other path piece by piece."""
    headers = [(b"content-length", b"4")] if scope["path"] == "/whole" else []
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    for piece in (b"ab", b"cd"):
        await send({"type": "http.response.body", "body": piece, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


@pytest.fixture
async def connected() -> AsyncIterator[Callable[[bytes], Awaitable[bytes]]]:
    """Yield a function that sends bytes on a new connection and returns everything until its end."""
    config = uvicorn.Config(streaming, lifespan="off", log_config=None, access_log=False)
    config.load()
    state, loop = ServerState(), asyncio.get_running_loop()
    options: dict[str, Any] = {"config": config, "server_state": state, "app_state": {}}
    server = await loop.create_server(lambda: BoundedProtocol(addresses=Addresses(9, ()), **options), "127.0.0.1", 0)

    async def ask(request: bytes) -> bytes:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        writer.write(request)
        answer = await reader.read()
        writer.close()
        await writer.wait_closed()
        return answer

    yield ask
    server.close()
    await server.wait_closed()


@pytest.mark.parametrize("keeps", [b"", b"connection: keep-alive\r\n"])
async def test_a_stream_to_a_client_of_http_1_0_ends_with_its_connection(
    connected: Callable[[bytes], Awaitable[bytes]], keeps: bytes
) -> None:
    head, _, body = (await connected(b"GET /pieces HTTP/1.0\r\n" + keeps + b"\r\n")).partition(b"\r\n\r\n")
    assert body == b"abcd"
    assert b"transfer-encoding" not in head
    assert b"connection: close" in head


async def test_answers_with_a_length_and_streams_of_http_1_1_stay_as_they_are(
    connected: Callable[[bytes], Awaitable[bytes]],
) -> None:
    whole = await connected(b"GET /whole HTTP/1.0\r\n\r\n")
    assert whole.endswith(b"\r\n\r\nabcd")
    chunked = await connected(b"GET /pieces HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    assert chunked.endswith(b"\r\n\r\n2\r\nab\r\n2\r\ncd\r\n0\r\n\r\n")
