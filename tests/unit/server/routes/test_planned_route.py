"""Dependencies that are called by a plan: what an endpoint may rely on, as with FastAPI's own routes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated

import pytest
from fastapi import APIRouter, Depends, FastAPI, HTTPException, Query, Request, Response
from httpx import ASGITransport, AsyncClient
from httpx import Response as Answered
from pydantic import BaseModel
from tinsmith_server.app import ROUTES
from tinsmith_server.routes.http.dependencies import API_PREFIX
from tinsmith_server.routes.http.planned_route import PlannedRoute, plan

CALLS_OF_A_LOOP = {"/asample", "/retrieve_future", "/forward_backward", "/optim_step", "/save_weights_for_sampler"}

happened: list[str] = []


class Answer(BaseModel):
    words: str
    note: str | None = None


async def shared(request: Request) -> str:
    happened.append("shared")
    return request.headers["x-words"]


Shared = Annotated[str, Depends(shared)]


async def opened(words: Shared, response: Response) -> AsyncIterator[str]:
    happened.append("opened")
    response.headers["x-said"] = words
    try:
        yield words.upper()
    finally:
        happened.append("closed")


async def makes_an_answer(words: Annotated[str, Depends(opened)], _again: Shared) -> Answer:
    happened.append("asked")
    if words == "FAIL":
        raise LookupError(words)
    return Answer(words=words)


async def asks_for_a_parameter(words: Shared, times: Annotated[int, Query(ge=1)] = 1) -> Answer:
    return Answer(words=words * times)


async def post(path: str, words: str = "word") -> Answered:
    happened.clear()
    router = APIRouter(prefix="/api", route_class=PlannedRoute)
    router.add_api_route("/answer", makes_an_answer, methods=["POST"], response_model_exclude_none=True)
    router.add_api_route("/parameter", asks_for_a_parameter, methods=["POST"])
    app = FastAPI(routes=router.routes)
    async with AsyncClient(transport=ASGITransport(app), base_url="http://server") as client:
        return await client.post(f"/api{path}", headers={"x-words": words})


async def test_each_dependency_is_called_once_and_its_resources_are_closed() -> None:
    answer = await post("/answer")

    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"
    assert answer.content == b'{"words":"WORD"}'
    assert happened == ["shared", "opened", "asked", "closed"]


async def test_the_headers_of_a_dependency_are_sent_with_the_answer() -> None:
    assert (await post("/answer")).headers["x-said"] == "word"


async def test_opened_resources_are_closed_after_a_failure() -> None:
    with pytest.raises(LookupError):
        await post("/answer", words="fail")

    assert happened[-1] == "closed"


async def test_an_endpoint_with_parameters_of_its_own_is_left_to_fastapi() -> None:
    assert (await post("/parameter?times=0")).status_code == 422


async def deny() -> None:
    raise HTTPException(401)


PLACES = ("the route", "its router", "who includes it")


@pytest.mark.parametrize("where", PLACES)
async def test_a_dependency_that_denies_is_asked_wherever_it_was_given(where: str) -> None:
    denies = {place: [Depends(deny)] if place == where else [] for place in PLACES}
    router = APIRouter(route_class=PlannedRoute, dependencies=denies["its router"])
    router.add_api_route("/answer", makes_an_answer, methods=["POST"], dependencies=denies["the route"])
    app = FastAPI()
    app.include_router(router, prefix="/api", dependencies=denies["who includes it"])
    async with AsyncClient(transport=ASGITransport(app), base_url="http://server") as client:
        assert (await client.post("/api/answer", headers={"x-words": "word"})).status_code == 401


@pytest.mark.parametrize("where", PLACES[:2])
async def test_a_dependency_that_denies_is_asked_by_the_plan(where: str) -> None:
    denies = {place: [Depends(deny)] if place == where else [] for place in PLACES}
    router = APIRouter(prefix="/api", route_class=PlannedRoute, dependencies=denies["its router"])
    router.add_api_route("/answer", makes_an_answer, methods=["POST"], dependencies=denies["the route"])
    app = FastAPI(routes=router.routes)
    async with AsyncClient(transport=ASGITransport(app), base_url="http://server") as client:
        assert (await client.post("/api/answer", headers={"x-words": "word"})).status_code == 401


async def test_a_status_or_an_answer_of_another_kind_is_left_to_fastapi() -> None:
    async def lists(_words: Shared) -> list[str]:
        return ["word"]

    router = APIRouter(route_class=PlannedRoute)
    router.add_api_route("/made", makes_an_answer, methods=["POST"], status_code=201)
    router.add_api_route("/listed", lists, methods=["POST"])
    app = FastAPI(routes=router.routes)
    async with AsyncClient(transport=ASGITransport(app), base_url="http://server") as client:
        assert (await client.post("/made", headers={"x-words": "word"})).status_code == 201
        assert (await client.post("/listed", headers={"x-words": "word"})).json() == ["word"]


def test_the_calls_of_a_training_loop_take_a_handful_of_steps() -> None:
    """A dependency outside of the plan would be slow without a visible error."""
    routes = [route for route in ROUTES if isinstance(route, PlannedRoute)]
    steps = {route.path.removeprefix(API_PREFIX): len(plan(route.dependant)) for route in routes if route.is_planned}

    assert steps.keys() >= CALLS_OF_A_LOOP
    assert max(steps[path] for path in CALLS_OF_A_LOOP) <= 8
