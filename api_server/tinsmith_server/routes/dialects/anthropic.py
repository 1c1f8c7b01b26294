"""Anthropic's calls: messages and token counts.

The base URL of clients is the server's address, or `…/anthropic/api`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal

import orjson
from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from tinsmith_rpc import worker_pb2
from typing_extensions import override

from tinsmith_server.errors import TinsmithError
from tinsmith_server.logs import redact
from tinsmith_server.routes.dialects.answers import EventWriter, TextGeneration, streamed_answer, whole_answer
from tinsmith_server.routes.dialects.requests import (
    ANTHROPIC,
    STREAMS,
    DialectRoute,
    add_not_here,
    conversation_as,
    misplaced,
    problems_as,
    status_of,
)
from tinsmith_server.routes.http.dependencies import ApiKey, ServicesDep, Tenant
from tinsmith_server.routes.http.openapi import takes
from tinsmith_server.wire.dialects.anthropic import (
    CountTokensRequest,
    MessageEvents,
    MessagesRequest,
    message,
    model,
    model_page,
)
from tinsmith_server.wire.dialects.texts import TokenUsage

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class AnthropicError(BaseModel):
    type: str
    message: str


class AnthropicProblem(BaseModel):
    """The body of every error."""

    type: Literal["error"] = "error"
    error: AnthropicError


def problem(status: int, detail: str) -> dict[str, Any]:
    kind = TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return AnthropicProblem(error=AnthropicError(type=kind, message=detail)).model_dump()


class AnthropicRoute(DialectRoute):
    problem = staticmethod(problem)


router = APIRouter(
    prefix=ANTHROPIC,
    tags=["Anthropic's dialect"],
    responses=problems_as(AnthropicProblem),
    route_class=AnthropicRoute,
)
elsewhere = APIRouter(route_class=AnthropicRoute)
"""The wrong paths of calls from clients with a wrong base URL.

Routes for these paths are added after all other routes.
"""


@router.post("/messages", summary="Answer a conversation", openapi_extra=takes(MessagesRequest), responses=STREAMS)
async def messages(
    body: Annotated[MessagesRequest, Depends(conversation_as(MessagesRequest))],
    request: Request,
    tenant: Tenant,
    services: ServicesDep,
    key: ApiKey,
) -> Response:
    generation = TextGeneration(services, key, body.text_request())
    if body.stream:
        return await streamed_answer(request, generation, tenant, MessageWriter(body.model))
    return await whole_answer(request, generation, tenant, lambda found, usage: message(body.model, found[0], usage))


@router.post("/messages/count_tokens", summary="Count a prompt's tokens", openapi_extra=takes(CountTokensRequest))
async def count_tokens(
    body: Annotated[CountTokensRequest, Depends(conversation_as(CountTokensRequest, samples=False))],
    tenant: Tenant,
    services: ServicesDep,
) -> Response:
    return JSONResponse({"input_tokens": await services.texts.count(tenant, body.model, body.prompt())})


@router.get("/models", summary="Base models and saved samplers")
async def list_models(
    tenant: Tenant,
    services: ServicesDep,
    limit: Annotated[int, Query(ge=1, le=1000)] = 20,
    after_id: str | None = None,
    before_id: str | None = None,
) -> Response:
    models = [(one.name, one.created) for one in await services.texts.models(tenant)]
    return JSONResponse(model_page(models, limit, after_id, before_id))


@router.get("/models/{name:path}", summary="One model")
async def get_model(name: str, tenant: Tenant, services: ServicesDep) -> Response:
    found = await services.texts.model(tenant, name)
    return JSONResponse(model(found.name, found.created))


CALLS = "/v1/messages and /v1/messages/count_tokens, /v1/models and /v1/models/{name}"
# Clients add /v1 themselves.
add_not_here(router, ["", "/{path:path}"], CALLS, "")
add_not_here(elsewhere, ["/anthropic", "/anthropic/{path:path}", *misplaced("/messages")], CALLS, "")


class MessageWriter(EventWriter):
    """A writer of Anthropic's events. Each event has a name."""

    def __init__(self, model: str) -> None:
        self._events = MessageEvents(model)

    @override
    def begin(self, usage: TokenUsage) -> Iterable[bytes]:
        return [_event(self._events.begin(usage))]

    @override
    def of(self, index: int, piece: worker_pb2.TextPiece) -> Iterable[bytes]:
        return [_event(event) for event in self._events.of(piece)]

    @override
    def end(self, usage: TokenUsage) -> Iterator[bytes]:
        for event in self._events.end(usage):
            yield _event(event)

    @override
    def error_event(self, error: TinsmithError) -> bytes:
        return _event(problem(status_of(error), redact(str(error))))


def _event(content: dict[str, Any]) -> bytes:
    return f"event: {content['type']}\ndata: ".encode() + orjson.dumps(content) + b"\n\n"
