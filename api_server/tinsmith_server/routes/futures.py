"""Polls. They are held until there is something to say, and never answer 5xx."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send
from typing_extensions import override

from tinsmith_server.errors import TinsmithError, TooBusy, Unprocessable
from tinsmith_server.logs import get_logger
from tinsmith_server.routes.bodies import body_as, off_the_loop
from tinsmith_server.routes.dependencies import API_PREFIX, ApiKey, ServicesDep, Tenant, get_services
from tinsmith_server.routes.openapi import takes
from tinsmith_server.routes.planned_route import Handler, PlannedRoute
from tinsmith_server.routes.problems import http_status, tell_user
from tinsmith_server.services.assembly import Services
from tinsmith_server.services.failures import Failure
from tinsmith_server.services.polling.futures import STOPPING, Answer, Metadata, Pending, Ready
from tinsmith_server.services.polling.sample_polls import SampleClient
from tinsmith_server.wire.ids import is_sample, session_of
from tinsmith_server.wire.json_results import result_as_json
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
from tinsmith_server.wire.token_counts import sampled_tokens

log = get_logger(__name__)

COMES_LATER = Pending("as many results of yours are on their way as may be at a time; this one comes after them")

Translate = Callable[[bytes], bytes]

PROTOBUF = "application/x-protobuf"
ANYTHING = "*/*"
RESULTS: dict[int | str, dict[str, Any]] = {
    200: {"content": {PROTOBUF: {}, "application/json": {}}},
    408: {"model": PendingResponse},
}
"""`responses` of a poll."""

# Of a small one there may be thousands; none waits for room.
SMALL_BYTES = 64 * 2**10
# What the socket does not take yet is held once more by whoever writes to it: a piece, instead of all.
PIECE_BYTES = 256 * 2**10
# Whoever reads no faster is cut off, and may poll again: others wait for the room.
GRACE_SECONDS = 15.0
LEAST_BYTES_PER_SECOND = 256 * 2**10
# Of a float in protobuf, until it is a number in decimal digits: the two beside each other.
TIMES_IN_JSON = 7


class HeldRoute(PlannedRoute):
    """Turns what would be a 5xx into a 408 after a full hold: the SDK repeats a poll that got a 5xx at once,
    some hundreds of times a second per future."""

    @override
    def around(self, handle: Handler) -> Handler:
        async def held(request: Request) -> Response:
            asked_at = asyncio.get_running_loop().time()
            try:
                return await handle(request)
            except HTTPException:
                raise
            except Exception as error:
                if isinstance(error, TinsmithError) and http_status(error) < 500:
                    raise
                _note(error)
                services = await get_services(request)
                hold_until = asked_at + services.settings.poll_hold_seconds
                return await services.long_polls.hold(_later(hold_until), _pending(STOPPING))

        return held


def _note(error: Exception) -> None:
    if isinstance(error, TinsmithError):
        log.warning("poll failed", reason=str(error))
    else:
        log.exception("poll failed")


async def _later(time: float) -> Response:
    await asyncio.sleep(time - asyncio.get_running_loop().time())
    return _pending(Pending("the server has met an error and tries again; its log says which", paused=True))


router = APIRouter(prefix=API_PREFIX, tags=["futures"], route_class=HeldRoute)


@router.post("/retrieve_future", openapi_extra=takes(RetrieveFutureRequest), responses=RESULTS)
async def retrieve_future(
    request: Request,
    body: Annotated[RetrieveFutureRequest, Depends(body_as(RetrieveFutureRequest))],
    tenant: Tenant,
    services: ServicesDep,
    key: ApiKey,
) -> Response:
    retrieve = partial(services.futures.retrieve, tenant, body.request_id, allow_metadata_only=body.allow_metadata_only)
    return await _told(retrieve, services, tenant, body.request_id, key, in_json=not reads_protobuf(request))


@router.get("/retrieve_future/{request_id}", summary="A result, for programs without an SDK", responses=RESULTS)
@router.post("/retrieve_future/{request_id}", summary="The same, by POST", responses=RESULTS)
async def retrieve_future_by_path(
    request_id: str, request: Request, tenant: Tenant, services: ServicesDep, key: ApiKey
) -> Response:
    """In JSON, unless protobuf is asked for by its name."""
    retrieve = partial(services.futures.retrieve, tenant, request_id, allow_metadata_only=False)
    in_json = PROTOBUF not in request.headers.get("accept", "")
    return await _told(retrieve, services, tenant, request_id, key, in_json=in_json)


@router.post(
    "/delete_model",
    summary="End a model, and wait until it is over",
    openapi_extra=takes(DeleteModelRequest),
    responses={200: {"model": DeletedModelResponse}, 408: {"model": PendingResponse}},
)
async def delete_model(
    body: Annotated[DeleteModelRequest, Depends(body_as(DeleteModelRequest))], tenant: Tenant, services: ServicesDep
) -> Response:
    """Its checkpoints stay. 408: what it was given before runs still; ask again."""
    ended = await services.operations.unload(tenant, body.model_id)
    answer = await services.futures.retrieve(tenant, str(ended), allow_metadata_only=False)
    if not isinstance(answer, Ready):
        return _response(answer)
    await services.sessions.finish_own(tenant, session_of(body.model_id))
    return JSONResponse(DeletedModelResponse(model_id=body.model_id).model_dump())


def reads_protobuf(request: Request) -> bool:
    """SDKs from 0.18 on say so where a result may be in it; without a word anything goes."""
    accepted = request.headers.get("accept", ANYTHING)
    return PROTOBUF in accepted or ANYTHING in accepted


async def _told(
    retrieve: Callable[[], Awaitable[Answer]],
    services: Services,
    tenant: str,
    request_id: str,
    key: str | None,
    *,
    in_json: bool,
) -> Response:
    answer = await retrieve()
    if not isinstance(answer, Ready):
        return _response(answer)
    if services.admission.rates.sampled.limits and is_sample(request_id):
        services.admission.rates.note_sampled(services.keys.counted_as(key), request_id, sampled_tokens(answer.payload))
    translate = partial(result_as_json, of_sample=is_sample(request_id)) if in_json and answer.protobuf else None
    size = len(answer.payload)
    if size <= SMALL_BYTES:
        return _response(await _translated(services, tenant, answer, translate))
    with ExitStack() as room:
        account = room.enter_context(services.admission.results.account(tenant))
        taken = size if translate is None else TIMES_IN_JSON * size
        kept = answer if account.has_room(taken) else None
        del answer  # nobody holds a result while it waits
        try:
            await account.take(taken)
        except TooBusy:
            return _pending(COMES_LATER)
        whole = kept or await retrieve()
        if not isinstance(whole, Ready):
            return _response(whole)
        whole = await _translated(services, tenant, whole, translate)
        return SentInPieces(whole.payload, _media_type(whole), room.pop_all())


async def _translated(services: Services, tenant: str, answer: Ready, translate: Translate | None) -> Ready:
    if translate is None:
        return answer
    text = await off_the_loop(services, tenant, len(answer.payload), partial(translate, answer.payload))
    return Ready(text, protobuf=False)


class SentInPieces(Response):
    """Gives its room back when the last piece is sent, or cannot be."""

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
        """Each waits until the socket has taken what was before it; so does the empty one at the end."""
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
        raise Unprocessable("training operations cannot be cancelled: those behind them count on them")
    return Empty()


def _media_type(answer: Ready) -> str:
    return PROTOBUF if answer.protobuf else "application/json"


def _response(answer: Answer) -> Response:
    match answer:
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
    if answer.told and answer.reason is not None:
        tell_user(response, answer.reason)
    return response
