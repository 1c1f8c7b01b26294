"""The meaning of a failed call."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from testcluster.ports import free_port
from tinsmith_trainer.errors import SamplerClosed, ServerError, UserError
from tinsmith_trainer.sampling.token_server.http import JsonCalls


async def answer(request: web.Request) -> web.Response:
    """Answer as configured."""
    return web.Response(status=int(request.query["status"]), text=await request.text())


async def hang_up(request: web.Request) -> web.Response:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


@pytest.fixture
async def calls() -> AsyncIterator[JsonCalls]:
    app = web.Application()
    app.add_routes([web.post("/answer", answer), web.post("/hang-up", hang_up), web.get("/well", answer)])
    async with TestServer(app) as server:
        calls = JsonCalls("The server", str(server.make_url("/")))
        yield calls
        await calls.close()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"error": {"message": "too long"}}, "too long"),
        ({"error_message": "no such adapter", "success": False}, "no such adapter"),
        ({"message": "plain"}, "plain"),
        ({"error": "in a word"}, "in a word"),
        ({"detail": "elsewhere"}, '{"detail": "elsewhere"}'),
    ],
)
async def test_a_refusal_of_the_server_is_a_user_error(calls: JsonCalls, body: dict[str, object], message: str) -> None:
    with pytest.raises(UserError) as refusal:
        await calls.post("/answer?status=400", body)
    assert str(refusal.value) == f"The server answered /answer?status=400 with status 400: {message}"


async def test_a_fault_of_the_server_is_its_own(calls: JsonCalls) -> None:
    with pytest.raises(ServerError, match="with status 500") as failure:
        await calls.post("/answer?status=500", {})
    assert not isinstance(failure.value, SamplerClosed)


async def test_a_server_that_hangs_up_has_lost_the_request(calls: JsonCalls) -> None:
    with pytest.raises(SamplerClosed, match="The server cannot be reached"):
        await calls.post("/hang-up", {})


async def test_a_server_that_is_not_there_is_not_healthy() -> None:
    calls = JsonCalls("The server", f"http://127.0.0.1:{free_port()}")
    with pytest.raises(SamplerClosed, match="The server cannot be reached"):
        await calls.post("/answer", {})
    assert not await calls.succeeds("/well?status=200")
    await calls.close()
