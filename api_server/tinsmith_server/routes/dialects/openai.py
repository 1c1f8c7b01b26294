"""OpenAI's calls: models, completions, chat completions. The base URL of clients is `…/v1` or `…/oai/api/v1`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from tinsmith_rpc import worker_pb2
from typing_extensions import override

from tinsmith_server.errors import TinsmithError
from tinsmith_server.logs import redact
from tinsmith_server.routes.dialects.answers import EventWriter, TextGeneration, streamed_answer, whole_answer
from tinsmith_server.routes.dialects.requests import (
    OPENAI,
    SHORT,
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
from tinsmith_server.wire.dialects.openai import (
    AnswerHead,
    ChatChunks,
    ChatCompletionRequest,
    CompletionChunks,
    CompletionRequest,
    chat_completion,
    completion,
    model,
    model_list,
)
from tinsmith_server.wire.dialects.texts import TokenUsage

TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
CODES = {401: "invalid_api_key", 404: "model_not_found", 429: "rate_limit_exceeded"}


class OpenAiError(BaseModel):
    message: str
    type: str
    param: None = None
    code: str | None = None


class OpenAiProblem(BaseModel):
    """The body of every error."""

    error: OpenAiError


def problem(status: int, detail: str) -> dict[str, Any]:
    kind = TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    error = OpenAiError(message=detail, type=kind, code=CODES.get(status))
    return OpenAiProblem(error=error).model_dump()


class OpenAiRoute(DialectRoute):
    problem = staticmethod(problem)


router = APIRouter(
    prefix=OPENAI, tags=["OpenAI's dialect"], responses=problems_as(OpenAiProblem), route_class=OpenAiRoute
)
elsewhere = APIRouter(route_class=OpenAiRoute)
"""The wrong paths of calls from clients with a wrong base URL.

Routes for these paths are added after all other routes.
"""


@router.get("/models", summary="Base models and saved samplers")
async def list_models(tenant: Tenant, services: ServicesDep) -> Response:
    models = await services.texts.models(tenant)
    return JSONResponse(model_list((one.name, one.created) for one in models))


@router.get("/models/{name:path}", summary="One model")
async def get_model(name: str, tenant: Tenant, services: ServicesDep) -> Response:
    found = await services.texts.model(tenant, name)
    return JSONResponse(model(found.name, found.created))


@router.post("/completions", summary="Continue a text", openapi_extra=takes(CompletionRequest), responses=STREAMS)
async def completions(
    body: Annotated[CompletionRequest, Depends(conversation_as(CompletionRequest))],
    request: Request,
    tenant: Tenant,
    services: ServicesDep,
    key: ApiKey,
) -> Response:
    return await answer_of(body, request, tenant, TextGeneration(services, key, body.text_request()))


@router.post(
    "/chat/completions", summary="Answer a conversation", openapi_extra=takes(ChatCompletionRequest), responses=STREAMS
)
async def chat_completions(
    body: Annotated[ChatCompletionRequest, Depends(conversation_as(ChatCompletionRequest))],
    request: Request,
    tenant: Tenant,
    services: ServicesDep,
    key: ApiKey,
) -> Response:
    return await answer_of(body, request, tenant, TextGeneration(services, key, body.text_request()))


async def answer_of(
    body: ChatCompletionRequest | CompletionRequest, request: Request, tenant: str, generation: TextGeneration
) -> Response:
    """Return the answer in the form of the request, as events if the request asks for a stream."""
    is_chat = isinstance(body, ChatCompletionRequest)
    head = AnswerHead(body.model, "chatcmpl" if is_chat else "cmpl")
    if body.stream:
        chunks = ChatChunks(head) if is_chat else CompletionChunks(head)
        return await streamed_answer(request, generation, tenant, ChunkWriter(chunks, with_usage=body.streams_usage))
    whole = chat_completion if is_chat else completion
    return await whole_answer(request, generation, tenant, lambda found, usage: whole(head, found, usage))


CALLS = "/models, /models/{name}, /completions and /chat/completions"
WRONG = misplaced("/chat/completions", "/completions", "/embeddings", "/responses")
add_not_here(router, ["", "/{path:path}"], CALLS, SHORT)
add_not_here(elsewhere, ["/oai", "/oai/{path:path}", "/models", "/models/{name:path}", *WRONG], CALLS, SHORT)


class ChunkWriter(EventWriter):
    """A writer of OpenAI's chunks. With `with_usage`, the last chunk before the end reports the usage."""

    def __init__(self, chunks: ChatChunks | CompletionChunks, *, with_usage: bool) -> None:
        self._chunks = chunks
        self._with_usage = with_usage

    @override
    def begin(self, usage: TokenUsage) -> Iterable[bytes]:
        return ()

    @override
    def of(self, index: int, piece: worker_pb2.TextPiece) -> Iterable[bytes]:
        return [_event(chunk) for chunk in self._chunks.of(index, piece)]

    @override
    def end(self, usage: TokenUsage) -> Iterator[bytes]:
        if self._with_usage:
            yield _event(self._chunks.usage(usage))
        yield b"data: [DONE]\n\n"

    @override
    def error_event(self, error: TinsmithError) -> bytes:
        return _event(problem(status_of(error), redact(str(error))))


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(content) + b"\n\n"
