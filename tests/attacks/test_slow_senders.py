"""Connections that send little, slowly or nothing: they end by themselves, and other clients do not notice."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack

import pytest
from support.server.attacked_server import AttackedServer, Uploads, answer
from tinsmith_server.cli import connections

CONNECTIONS = 300
"""The connections that one address may have at the server of these tests."""


async def ended(reader: asyncio.StreamReader) -> bytes:
    """All that the server says until it ends the connection."""
    try:
        return await asyncio.wait_for(reader.read(), 2 * connections.HEAD_SECONDS)
    except ConnectionError:
        return b""


async def test_connections_that_begin_no_request_or_never_end_its_header_are_ended(server: AttackedServer) -> None:
    """While others are served; a header that comes byte by byte gets no more time than one that stops."""
    started = time.monotonic()
    async with AsyncExitStack() as stack, server.tenant("victim") as victim:
        silent = [await stack.enter_async_context(server.connected()) for _ in range(100)]
        begun = [await stack.enter_async_context(server.connected()) for _ in range(100)]
        for _, writer in begun:
            writer.write(b"POST /api/v1/asample HTTP/1.1\r\nX-A: ")
        blank = [await stack.enter_async_context(server.connected()) for _ in range(10)]
        drips = [
            asyncio.create_task(drip([writer for _, writer in begun[:50]], b"a")),
            asyncio.create_task(drip([writer for _, writer in blank], b"\r\n")),
        ]
        await victim.session()
        said = await asyncio.gather(*(ended(reader) for reader, _ in (*silent, *begun, *blank)))
        for task in drips:
            task.cancel()
    assert set(said[:100]) | set(said[200:]) == {b""}
    assert all(words.startswith(b"HTTP/1.1 408 ") for words in said[150:200])
    assert time.monotonic() - started > connections.HEAD_SECONDS / 2


async def drip(writers: list[asyncio.StreamWriter], part: bytes) -> None:
    while True:
        for writer in writers:
            if not writer.is_closing():
                writer.write(part)
        await asyncio.sleep(0.5)


async def test_an_address_cannot_exceed_its_connections_and_regains_closed_ones(server: AttackedServer) -> None:
    async with AsyncExitStack() as stack:
        opened = [await stack.enter_async_context(server.connected()) for _ in range(CONNECTIONS + 50)]
        for _, writer in opened:
            writer.write(server.head("/get_server_capabilities", content_length=0))
        answers = await asyncio.gather(*(answer(reader) for reader, _ in opened))
    assert 0 < answers.count(405) <= CONNECTIONS
    assert answers.count(0) >= 50
    async with server.tenant("victim") as victim:
        while True:  # until the server has seen that they are closed
            try:
                await victim.session()
                return
            except OSError:
                await asyncio.sleep(0.1)


async def test_a_body_that_does_not_come_is_answered_and_holds_nothing_that_was_not_sent(
    server: AttackedServer,
) -> None:
    before = server.resident_bytes
    async with AsyncExitStack() as stack:
        opened = [await stack.enter_async_context(server.connected()) for _ in range(100)]
        for _, writer in opened:
            writer.write(server.head("/forward_backward", content_length=60 * 2**20) + b"\x0a\x01a\x10\x01")
        async with server.tenant("victim") as victim:
            await victim.session()
        assert server.resident_bytes - before < 64 * 2**20
        answers = await asyncio.gather(*(answer(reader) for reader, _ in opened))
    assert set(answers) == {408}


async def test_the_rest_of_a_body_that_was_refused_is_taken_in_and_forgotten(server: AttackedServer) -> None:
    """A client that sends all of it before it reads gets its answer, and may use the connection again."""
    size = 30 * 2**20
    async with server.connected() as (reader, writer):
        writer.write(server.head("/optim_step", content_length=size))
        for _ in range(30):
            writer.write(bytes(2**20))
            await writer.drain()
        assert await answer(reader) == 413
        while (await reader.readline()).strip():
            pass
        await reader.readuntil(b"}")
        writer.write(server.head("/optim_step", content_length=0))
        assert await answer(reader) == 422


async def test_an_upload_that_ends_in_the_middle_gives_its_room_back(server: AttackedServer) -> None:
    async with server.tenant("attacker") as tenant:
        model_id = (await tenant.model(await tenant.session())).encode()
        head = b"\x0a%c%b\x10\x01" % (len(model_id), model_id)
        async with Uploads.held(server, 10, 60 * 2**20, head) as uploads:
            await uploads.until_nothing_moves()
        response = await tenant.post("/forward_backward", head + b"\x3a\x80\x80\x80\x02" + bytes(2**22))
        assert response.status_code == 200


@pytest.mark.parametrize(
    "fields",
    [
        b"X-A: " + b"a" * 40_000 + b"\r\n\r\n",
        b"X-A: b\r\n" * 20_000,
        b"X-A: " + b"a" * 5_000_000,
        b"".join(b"X-%d: b\r\n" % number for number in range(101)) + b"\r\n",
    ],
    ids=["one long", "very many", "without end", "many"],
)
async def test_a_header_over_the_limit_is_answered_at_once(server: AttackedServer, fields: bytes) -> None:
    async with server.connected() as (reader, writer):
        writer.write(b"POST /api/v1/asample HTTP/1.1\r\nHost: server\r\n" + fields)
        assert await asyncio.wait_for(answer(reader), connections.HEAD_SECONDS / 2) in {431, 0}
