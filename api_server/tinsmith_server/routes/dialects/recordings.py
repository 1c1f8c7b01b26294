"""Recordings of agents: calls to open, read and delete recordings, and OpenAI's calls whose turns are recorded.

The base URL of an agent's client is `…/oai/recordings/<recording_id>/v1`. The field `model` of its requests has no
effect: the model of the recording answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Annotated

import orjson
from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import JSONResponse
from typing_extensions import override

from tinsmith_server.routes.dialects.answers import IndexedPiece, TextGeneration
from tinsmith_server.routes.dialects.openai import CALLS, OpenAiProblem, OpenAiRoute, answer_of
from tinsmith_server.routes.dialects.requests import (
    RECORDED,
    STREAMS,
    add_not_here,
    base_url,
    conversation_as,
    problems_as,
)
from tinsmith_server.routes.http.bodies import body_as
from tinsmith_server.routes.http.dependencies import API_PREFIX, ApiKey, Limit, Offset, ServicesDep, Tenant
from tinsmith_server.routes.http.event_stream import EventStream
from tinsmith_server.routes.http.openapi import takes
from tinsmith_server.services.assembly import Services
from tinsmith_server.services.recordings.recordings import RecordedRequest
from tinsmith_server.store.records import Recording
from tinsmith_server.wire.dialects.openai import ChatCompletionRequest, CompletionRequest, model, model_list
from tinsmith_server.wire.dialects.texts import Message
from tinsmith_server.wire.plain_requests import CreateRecordingRequest
from tinsmith_server.wire.responses import (
    Empty,
    RecordedResponse,
    RecordedSequence,
    RecordingResponse,
    RecordingsResponse,
)

router = APIRouter(prefix=f"{API_PREFIX}/recordings", tags=["recordings"])
agents = APIRouter(prefix=RECORDED, tags=["recordings"], responses=problems_as(OpenAiProblem), route_class=OpenAiRoute)


@router.post("", summary="Open a recording", openapi_extra=takes(CreateRecordingRequest))
async def create_recording(
    body: Annotated[CreateRecordingRequest, Depends(body_as(CreateRecordingRequest))],
    request: Request,
    tenant: Tenant,
    services: ServicesDep,
) -> RecordingResponse:
    return _described(await services.recordings.create(tenant, body), request)


@router.get("", summary="Recordings, newest first")
async def list_recordings(
    request: Request, tenant: Tenant, services: ServicesDep, limit: Limit = 20, offset: Offset = 0
) -> RecordingsResponse:
    page = await services.recordings.list(tenant, limit, offset)
    return RecordingsResponse(recordings=[_described(one, request) for one in page.rows], total=page.total)


@router.get("/{recording_id}", summary="The sequences of a recording", response_model=RecordedResponse)
async def read_recording(recording_id: str, request: Request, tenant: Tenant, services: ServicesDep) -> Response:
    recording = await services.recordings.get(tenant, recording_id)
    head = _described(recording, request).model_dump_json()
    opened = await services.recordings.read(recording)

    async def close() -> None:
        opened.close()

    return JsonStream(_read(head, opened.sequences()), close)


async def _read(head: str, sequences: Iterator[RecordedSequence]) -> AsyncIterator[bytes]:
    """Yield the answer in parts, because sequences with a common beginning are larger than the recording."""
    yield f'{head.removesuffix("}")},"sequences":['.encode()
    separator = b""
    while part := await asyncio.to_thread(_next_part, sequences):
        yield separator + part
        separator = b","
    yield b"]}"


def _next_part(sequences: Iterator[RecordedSequence]) -> bytes:
    sequence = next(sequences, None)
    return b"" if sequence is None else orjson.dumps(sequence.model_dump())


class JsonStream(EventStream):
    """A JSON answer in parts."""

    media_type = "application/json"


@router.delete("/{recording_id}", summary="Delete a recording")
async def delete_recording(recording_id: str, tenant: Tenant, services: ServicesDep) -> Empty:
    await services.recordings.delete(tenant, recording_id)
    return Empty()


def _described(recording: Recording, request: Request) -> RecordingResponse:
    return RecordingResponse(
        recording_id=recording.recording_id,
        model=recording.model,
        base_url=base_url(request, RECORDED.format(recording_id=recording.recording_id)),
        created_at=recording.created_at,
        expires_at=recording.expires_at,
        max_turns=recording.most_turns,
        max_bytes=recording.most_bytes,
        turns=recording.turns,
        size_bytes=recording.size_bytes,
    )


@agents.get("/models", summary="The model of a recording")
async def list_models(recording_id: str, tenant: Tenant, services: ServicesDep) -> Response:
    recording = await services.recordings.get(tenant, recording_id)
    return JSONResponse(model_list([(recording.model, int(recording.created_at.timestamp()))]))


@agents.get("/models/{name:path}", summary="The model of a recording, under any name")
async def get_model(recording_id: str, name: str, tenant: Tenant, services: ServicesDep) -> Response:
    recording = await services.recordings.get(tenant, recording_id)
    return JSONResponse(model(name, int(recording.created_at.timestamp())))


@agents.post(
    "/completions", summary="Continue a text, and record it", openapi_extra=takes(CompletionRequest), responses=STREAMS
)
async def completions(
    recording_id: str,
    body: Annotated[CompletionRequest, Depends(conversation_as(CompletionRequest))],
    request: Request,
    tenant: Tenant,
    services: ServicesDep,
    key: ApiKey,
) -> Response:
    return await answer_of(body, request, tenant, RecordedGeneration(services, key, body, recording_id))


@agents.post(
    "/chat/completions",
    summary="Answer an agent, and record the turn",
    openapi_extra=takes(ChatCompletionRequest),
    responses=STREAMS,
)
async def chat_completions(
    recording_id: str,
    body: Annotated[ChatCompletionRequest, Depends(conversation_as(ChatCompletionRequest))],
    request: Request,
    tenant: Tenant,
    services: ServicesDep,
    key: ApiKey,
) -> Response:
    return await answer_of(body, request, tenant, RecordedGeneration(services, key, body, recording_id))


add_not_here(agents, ["", "/{path:path}"], CALLS, RECORDED)


class RecordedGeneration(TextGeneration):
    """The samples of a recorded request.

    The turns are stored before the last piece is returned, so that a request after the answer finds them. If the client
    disconnects before, nothing is stored, because the agent did not get the answer.
    """

    def __init__(
        self, services: Services, key: str | None, body: ChatCompletionRequest | CompletionRequest, recording_id: str
    ) -> None:
        super().__init__(services, key, body.text_request())
        self._recording_id = recording_id
        self._recorded: RecordedRequest | None = None

    @override
    async def begin(self, tenant: str) -> None:
        """Submit the samples. Raises the errors of `Recordings.prepare` and `Texts.begin`."""
        self._recorded = await self._services.recordings.prepare(tenant, self._recording_id, self._request)
        self._request = self._recorded.request
        await super().begin(tenant)

    @override
    async def pieces(self) -> AsyncIterator[IndexedPiece]:
        answers = [Message() for _ in range(len(self._request.prompts) * self._request.choices)]
        held: IndexedPiece | None = None
        async for index, piece in super().pieces():
            answers[index].add(piece)
            if held is not None:
                yield held
            held = index, piece
        assert self._recorded is not None, "begin() is called first"
        await self._services.recordings.record(self._recorded, self._generations, answers)
        if held is not None:
            yield held
