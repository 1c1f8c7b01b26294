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


async def events(request: web.Request) -> web.Response:
    """Answer with one event, which is the body."""
    return web.Response(text=f"data: {await request.text()}\n\ndata: [DONE]\n\n", content_type="text/event-stream")


async def hang_up(request: web.Request) -> web.Response:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


@pytest.fixture
async def calls() -> AsyncIterator[JsonCalls]:
    app = web.Application()
    app.add_routes([web.post("/answer", answer), web.post("/events", events)])
    app.add_routes([web.post("/hang-up", hang_up), web.get("/well", answer)])
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


async def test_an_event_with_an_error_has_the_status_of_the_servers_errors(calls: JsonCalls) -> None:
    error = {"error": {"message": "too long"}}
    with pytest.raises(ServerError, match="answered /events with status 500: too long"):
        _ = [event async for event in calls.stream("/events", error)]
    with pytest.raises(UserError, match="answered /events with status 400: too long"):
        _ = [event async for event in calls.stream("/events", error, error_status=400)]
    assert [event async for event in calls.stream("/events", {"token": 5})] == [{"token": 5}]


async def test_a_server_that_hangs_up_has_lost_the_request(calls: JsonCalls) -> None:
    with pytest.raises(SamplerClosed, match="The server cannot be reached"):
        await calls.post("/hang-up", {})


async def test_a_server_that_is_not_there_is_not_healthy() -> None:
    calls = JsonCalls("The server", f"http://127.0.0.1:{free_port()}")
    with pytest.raises(SamplerClosed, match="The server cannot be reached"):
        await calls.post("/answer", {})
    assert not await calls.succeeds("/well?status=200")
    await calls.close()
