"""Request bodies: read within the limit and only after the key has been checked, and described in the OpenAPI page."""

from __future__ import annotations

import asyncio
import io
import zlib
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import orjson
import zstandard
from fastapi import Depends, FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel, ValidationError
from pydantic.json_schema import models_json_schema
from tinsmith_rpc import worker_pb2

from tinsmith_server.errors import BodyTooLarge, Unprocessable
from tinsmith_server.routes.dependencies import ServicesDep, Tenant
from tinsmith_server.services.failures import rejection
from tinsmith_server.wire import requests
from tinsmith_server.wire.head import HeadUnreadable, read_head
from tinsmith_server.wire.ids import operation_number
from tinsmith_server.wire.requests import sentence

M = TypeVar("M", bound=BaseModel)

TELEMETRY_LIMIT_BYTES = 2**20

STABLE_REINFORCE_NOTE = (
    "stable_reinforce has no public formula; this server runs it as cispo with the same inputs "
    "(setting map_stable_reinforce)"
)

_REFERENCE = "#/components/schemas/{model}"

PROTOBUF_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "description": "Tinker's ForwardBackwardRequest, optionally with Content-Encoding zstd or gzip.",
        "content": {"application/x-protobuf": {"schema": {"type": "string", "format": "binary"}}},
    }
}


async def read_json_object(request: Request, _tenant: Tenant, services: ServicesDep) -> dict[str, Any]:
    """Raises BodyTooLarge, and Unprocessable for anything but a JSON object."""
    limit = services.settings.max_body_bytes
    body, complete = await _read(request, limit)
    if not complete:
        raise BodyTooLarge(_over(limit))
    try:
        content = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise Unprocessable(f"the body is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise Unprocessable("the body must be a JSON object")
    return content


JsonObject = Annotated[dict[str, Any], Depends(read_json_object)]


def body_as(model: type[M]) -> Callable[[dict[str, Any]], M]:
    """A dependency that validates the body. Only for requests without a future: its errors are 422s."""

    def validate(content: JsonObject) -> M:
        try:
            return model.model_validate(content)
        except ValidationError as error:
            raise Unprocessable(sentence(error)) from error

    return validate


async def read_forward_backward(
    request: Request, response: Response, _tenant: Tenant, services: ServicesDep
) -> worker_pb2.SubmitRequest:
    """The operation as the worker is given it, but for the epoch; the SDK's message travels in it as it came.

    Raises Unprocessable only when model_id or seq_id cannot be read; the rest is the future's business, and a body
    that cannot be run is not kept.
    """
    limit = services.settings.max_body_bytes
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    body, complete = await _read(request, limit)
    try:
        # Unpacking megabytes would hold up every poll; a plain body is only skipped through.
        unpack = encoding != "identity"
        head = await asyncio.to_thread(read_head, body, encoding) if unpack else read_head(body)
    except HeadUnreadable as error:
        raise Unprocessable(str(error)) from error
    operation = worker_pb2.SubmitRequest(
        model_id=head.model_id, seq_id=operation_number(head.seq_id), kind=worker_pb2.FORWARD_BACKWARD
    )
    if not complete or (encoding == "zstd" and _declared_size(body) > limit):
        operation.rejection.CopyFrom(rejection(_over(limit)))
    elif encoding == "gzip":
        await asyncio.to_thread(_gunzip_into, operation, body, limit)
    else:
        operation.payload, operation.zstd = body, encoding == "zstd"
    if head.loss_fn == "stable_reinforce" and services.settings.map_stable_reinforce:
        response.headers["x-deprecation-note"] = STABLE_REINFORCE_NOTE
    return operation


ForwardBackward = Annotated[worker_pb2.SubmitRequest, Depends(read_forward_backward)]


async def read_telemetry_body(request: Request) -> bytes:
    """What fits; a batch over the limit is not worth an error to the client."""
    body, complete = await _read(request, TELEMETRY_LIMIT_BYTES)
    return body if complete else b""


def takes(model: type[BaseModel]) -> dict[str, Any]:
    """`openapi_extra` of a route that reads this JSON body."""
    schema = {"$ref": _REFERENCE.format(model=model.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def install_openapi(app: FastAPI) -> None:
    """Serves the generated document with the schemas that `takes` refers to."""

    def openapi() -> dict[str, Any]:
        if not app.openapi_schema:
            document = get_openapi(title=app.title, version=app.version, routes=app.routes, summary=app.summary)
            document.setdefault("components", {}).setdefault("schemas", {}).update(_request_schemas())
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


async def _read(request: Request, limit: int) -> tuple[bytes, bool]:
    """The body's beginning up to the limit, and whether that is all. The rest is drained: a client that
    is cut off while it sends sees a broken connection, not our answer."""
    parts = io.BytesIO()
    complete = True
    async for part in request.stream():
        room = limit - parts.tell()
        complete = complete and len(part) <= room
        parts.write(part[:room])
    return parts.getvalue(), complete


def _declared_size(frame: bytes) -> int:
    """A frame without a declared size is bounded by the worker, which decompresses it."""
    try:
        return int(zstandard.frame_content_size(frame))
    except zstandard.ZstdError:
        return 0


def _gunzip_into(operation: worker_pb2.SubmitRequest, body: bytes, limit: int) -> None:
    decompressor = zlib.decompressobj(zlib.MAX_WBITS | 16)
    try:
        content = decompressor.decompress(body, limit + 1)
    except zlib.error as error:
        operation.rejection.CopyFrom(rejection(f"the gzip body is damaged: {error}"))
        return
    if len(content) > limit:
        operation.rejection.CopyFrom(rejection(_over(limit)))
    else:
        operation.payload = content


def _over(limit: int) -> str:
    return f"the body is over this server's limit of {limit} bytes (setting max_body_bytes)"


def _request_schemas() -> dict[str, Any]:
    bodies = [(model, "validation") for model in requests.Request.__subclasses__()]
    _, definitions = models_json_schema(bodies, ref_template=_REFERENCE)  # type: ignore[arg-type]
    schemas: dict[str, Any] = definitions["$defs"]
    return schemas
