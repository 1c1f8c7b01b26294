"""The routes of polls. A poll is held until an answer exists, and is never answered with 5xx."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send
from typing_extensions import override

from tinsmith_server.errors import TinsmithError, Unprocessable
from tinsmith_server.logs import get_logger
from tinsmith_server.routes.http.bodies import body_as
from tinsmith_server.routes.http.dependencies import API_PREFIX, ApiKey, ServicesDep, Tenant, get_services
from tinsmith_server.routes.http.openapi import takes
from tinsmith_server.routes.http.planned_route import Handler, PlannedRoute
from tinsmith_server.routes.http.problems import http_status, set_user_notice
from tinsmith_server.services.failures import Failure
from tinsmith_server.services.polling.futures import Answer, Metadata, Ready
from tinsmith_server.services.polling.long_polls import Pending
from tinsmith_server.services.polling.results import LargeResult
from tinsmith_server.services.polling.sample_polls import SampleClient
from tinsmith_server.wire.plain_requests import DeleteModelRequest
from tinsmith_server.wire.requests import CancelFutureRequest, RetrieveFutureRequest, RetrieveFuturesRequest
from tinsmith_server.wire.responses import (
    CompletionResponse,
    DeletedModelResponse,
    Empty,
    FailedResponse,
    MetadataResponse,
    PendingResponse,
    RetrieveFuturesResponse,
)

log = get_logger(__name__)

PROTOBUF = "application/x-protobuf"
ANYTHING = "*/*"
RESULTS: dict[int | str, dict[str, Any]] = {
    200: {"content": {PROTOBUF: {}, "application/json": {}}},
    408: {"model": PendingResponse},
}
"""The OpenAPI `responses` of a poll."""

# uvicorn copies all bytes that the socket has not taken yet. With pieces, it copies one piece instead of the whole
# result.
PIECE_BYTES = 256 * 2**10
# A slower client is disconnected, because other results wait for the memory. The client may poll again.
GRACE_SECONDS = 15.0
LEAST_BYTES_PER_SECOND = 256 * 2**10


class HeldRoute(PlannedRoute):
    """A route that holds a failed request instead of answering 5xx immediately."""

    @override
    def around(self, handle: Handler) -> Handler:
        async def held(request: Request) -> Response:
            services = await get_services(request)
            answer = await services.long_polls.hold_failure(lambda: handle(request), is_final=_is_final)
            if not isinstance(answer, Pending):
                return answer
            secret = request.headers.get("x-api-key") or request.headers.get("authorization", "")
            return _pending(services.long_polls.with_notice(answer, owner=f"client {hash(secret)}"))

        return held


def _is_final(error: Exception) -> bool:
    return isinstance(error, HTTPException) or (isinstance(error, TinsmithError) and http_status(error) < 500)


router = APIRouter(prefix=API_PREFIX, tags=["futures"], route_class=HeldRoute)


@router.post("/retrieve_future", openapi_extra=takes(RetrieveFutureRequest), responses=RESULTS)
async def retrieve_future(
    request: Request,
    body: Annotated[RetrieveFutureRequest, Depends(body_as(RetrieveFutureRequest))],
    tenant: Tenant,
    services: ServicesDep,
    key: ApiKey,
) -> Response:
    answer = await services.results.fetch(
        tenant,
        body.request_id,
        key,
        in_json=not reads_protobuf(request),
        allow_metadata_only=body.allow_metadata_only,
    )
    return _response(answer)


@router.get("/retrieve_future/{request_id}", summary="A result, for programs without an SDK", responses=RESULTS)
@router.post("/retrieve_future/{request_id}", summary="The same, with POST", responses=RESULTS)
async def retrieve_future_by_path(
    request_id: str, request: Request, tenant: Tenant, services: ServicesDep, key: ApiKey
) -> Response:
    """Return the result in JSON, unless the client asks for protobuf by name."""
    in_json = PROTOBUF not in request.headers.get("accept", "")
    return _response(await services.results.fetch(tenant, request_id, key, in_json=in_json))


@router.post(
    "/delete_model",
    summary="End a model, and wait until it is over",
    openapi_extra=takes(DeleteModelRequest),
    responses={200: {"model": DeletedModelResponse}, 408: {"model": PendingResponse}},
)
async def delete_model(
    body: Annotated[DeleteModelRequest, Depends(body_as(DeleteModelRequest))], tenant: Tenant, services: ServicesDep
) -> Response:
    """End a model, and keep its checkpoints. 408 means that earlier operations of the model still run: ask again."""
    answer = await services.results.delete_model(tenant, body.model_id)
    if not isinstance(answer, Ready):
        return _response(answer)
    return JSONResponse(DeletedModelResponse(model_id=body.model_id).model_dump())


def reads_protobuf(request: Request) -> bool:
    """Return whether the client reads protobuf. SDKs from 0.18 on request protobuf.

    A client without an Accept header accepts any format.
    """
    accepted = request.headers.get("accept", ANYTHING)
    return PROTOBUF in accepted or ANYTHING in accepted


class SentInPieces(Response):
    """A response sent in pieces. The response frees its memory when the last piece is sent, or when an error occurs."""

    def __init__(self, content: bytes, media_type: str, room: ExitStack) -> None:
        super().__init__(content, media_type=media_type)
        self._room = room

    @override
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._room:
            async with asyncio.timeout(GRACE_SECONDS + len(self.body) / LEAST_BYTES_PER_SECOND):
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                await self._send_pieces(send)

    async def _send_pieces(self, send: Send) -> None:
        """Send the pieces.

        Each `send` waits until the socket has taken the previous piece. The last `send`, which is empty, also waits.
        """
        whole = memoryview(self.body)
        for start in range(0, len(whole), PIECE_BYTES):
            piece = bytes(whole[start : start + PIECE_BYTES])
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


@router.post(
    "/retrieve_futures",
    summary="Which samples of a sampling client have ended",
    openapi_extra=takes(RetrieveFuturesRequest),
    responses={200: {"model": RetrieveFuturesResponse}, 408: {"model": PendingResponse}},
)
async def retrieve_futures(
    body: Annotated[RetrieveFuturesRequest, Depends(body_as(RetrieveFuturesRequest))],
    tenant: Tenant,
    services: ServicesDep,
) -> Response:
    target = SampleClient(tenant, body.target.sampling_session_id, body.target.cloned_sampler_id)
    answer = await services.sample_polls.poll(target, body.prev_cursor, body.timeout)
    if isinstance(answer, Pending):
        return _pending(answer)
    completions = [
        CompletionResponse(
            state="failed" if one.failed else "finished",
            request_id=one.request_id,
            response_payload_uncompressed_size=None if one.failed else one.size_bytes,
        )
        for one in answer.ended
    ]
    found = RetrieveFuturesResponse(completions=completions, cursor=answer.cursor)
    return Response(found.model_dump_json(exclude_none=True), media_type="application/json")


@router.post("/cancel_future", openapi_extra=takes(CancelFutureRequest))
async def cancel_future(
    body: Annotated[CancelFutureRequest, Depends(body_as(CancelFutureRequest))], tenant: Tenant, services: ServicesDep
) -> Empty:
    if not await services.futures.cancel(tenant, body.request_id):
        raise Unprocessable("training operations cannot be cancelled: later operations depend on them")
    return Empty()


def _media_type(answer: Ready) -> str:
    return PROTOBUF if answer.protobuf else "application/json"


def _response(answer: Answer | LargeResult) -> Response:
    match answer:
        case LargeResult(result, room):
            return SentInPieces(result.payload, _media_type(result), room)
        case Ready(payload):
            return Response(payload, media_type=_media_type(answer))
        case Metadata(size_bytes):
            return JSONResponse(MetadataResponse(response_payload_size=size_bytes).model_dump())
        case Failure(category, message):
            return JSONResponse(FailedResponse(error=message, category=category).model_dump())
        case Pending():
            return _pending(answer)


def _pending(answer: Pending) -> Response:
    queue_state: Literal["active", "paused_capacity"] = "paused_capacity" if answer.paused else "active"
    state = PendingResponse(queue_state=queue_state, queue_state_reason=answer.reason)
    response = JSONResponse(state.model_dump(), 408)
    if answer.show_now and answer.reason is not None:
        set_user_notice(response, answer.reason)
    return response
