"""The log lines of requests."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import httpx
import pytest
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send
from tinsmith_server.metrics.server import Metrics
from tinsmith_server.routes.http.middleware import HeadRequests, Observing, without_links


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/api/v1/uploads/dG9rZW4.c2ln/adapter_config.json", "/api/v1/uploads/…/adapter_config.json"),
        ("/api/v1/downloads/dG9rZW4.c2ln/a/b.safetensors", "/api/v1/downloads/…/a/b.safetensors"),
        ("/api/v1/sessions/sess-1", "/api/v1/sessions/sess-1"),
    ],
)
def test_links_that_are_a_permission_by_themselves_are_left_out(path: str, expected: str) -> None:
    assert without_links(path) == expected


async def test_head_of_a_stream_reads_none_of_it_behind_the_first_part() -> None:
    """The stream may be an archive of gigabytes, which GET would compress."""
    app, read = FastAPI(), []

    async def parts() -> AsyncIterator[bytes]:
        for part in range(1000):
            read.append(part)
            yield b"bytes"

    @app.get("/archive")
    async def archive() -> StreamingResponse:
        return StreamingResponse(parts(), media_type="application/gzip")

    app.add_middleware(HeadRequests)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
        headed = await client.head("/archive")
        assert (headed.status_code, headed.headers["content-type"], headed.content) == (200, "application/gzip", b"")
        assert read == [0]
        assert (await client.get("/archive")).content == b"bytes" * 1000


@pytest.mark.parametrize(("begun", "status"), [(False, 500), (True, 200)], ids=["before", "during"])
async def test_a_crash_is_one_problem_for_the_client_or_a_broken_answer(begun: bool, status: int) -> None:
    """After the first bytes, only a broken connection shows the client that its answer is incomplete."""
    sent: list[Message] = []

    async def app(_scope: Scope, _receive: Receive, send: Send) -> None:
        if begun:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        raise RuntimeError("secret")

    async def send(message: Message) -> None:
        sent.append(message)

    observing = Observing(app, Metrics(), frozenset())
    scope = {"type": "http", "method": "GET", "path": "/crash", "headers": [], "query_string": b""}
    with pytest.raises(RuntimeError) if begun else contextlib.nullcontext():
        await observing(scope, asyncio.Event().wait, send)  # type: ignore[arg-type]
    assert sent[0]["status"] == status
    body = b"".join(message.get("body", b"") for message in sent)
    assert b"secret" not in body
    assert begun or b"internal server error; see the server's log" in body
