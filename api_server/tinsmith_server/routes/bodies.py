"""Request bodies: read within the limit and only after the key has been checked, and described in the OpenAPI page."""

from __future__ import annotations

import asyncio
import io
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import orjson
import zstandard
from fastapi import Depends, FastAPI, Request
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel, ValidationError
from pydantic.json_schema import models_json_schema

from tinsmith_server.errors import BodyTooLarge, Unprocessable
from tinsmith_server.routes.dependencies import ServicesDep, Tenant
from tinsmith_server.wire import requests
from tinsmith_server.wire.head import Head, HeadUnreadable, read_head
from tinsmith_server.wire.requests import sentence

M = TypeVar("M", bound=BaseModel)

TELEMETRY_LIMIT_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class TrainingBody:
    """A forward_backward body. With a problem its ids are known but its content is not worth keeping."""

    head: Head
    body: bytes
    zstd: bool
    problem: str | None = None


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


async def read_training_body(request: Request, _tenant: Tenant, services: ServicesDep) -> TrainingBody:
    """Raises Unprocessable only when model_id or seq_id cannot be read; the rest is the future's business."""
    limit = services.settings.max_body_bytes
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    body, complete = await _read(request, limit)
    try:
        # Unpacking megabytes would hold up every poll; a plain body is only skipped through.
        unpack = encoding != "identity"
        head = await asyncio.to_thread(read_head, body, encoding) if unpack else read_head(body)
    except HeadUnreadable as error:
        raise Unprocessable(str(error)) from error
    if not complete or (encoding == "zstd" and _declared_size(body) > limit):
        return TrainingBody(head, b"", zstd=False, problem=_over(limit))
    if encoding == "gzip":
        return await asyncio.to_thread(_gunzipped, head, body, limit)
    return TrainingBody(head, body, zstd=encoding == "zstd")


async def read_telemetry_body(request: Request) -> bytes:
    """What fits; a batch over the limit is not worth an error to the client."""
    body, complete = await _read(request, TELEMETRY_LIMIT_BYTES)
    return body if complete else b""


TrainingBodyDep = Annotated[TrainingBody, Depends(read_training_body)]


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


def _gunzipped(head: Head, body: bytes, limit: int) -> TrainingBody:
    decompressor = zlib.decompressobj(zlib.MAX_WBITS | 16)
    try:
        content = decompressor.decompress(body, limit + 1)
    except zlib.error as error:
        return TrainingBody(head, b"", zstd=False, problem=f"the gzip body is damaged: {error}")
    if len(content) > limit:
        return TrainingBody(head, b"", zstd=False, problem=_over(limit))
    return TrainingBody(head, content, zstd=False)


def _over(limit: int) -> str:
    return f"the body is over this server's limit of {limit} bytes (setting max_body_bytes)"


_REFERENCE = "#/components/schemas/{model}"

PROTOBUF_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "description": "Tinker's ForwardBackwardRequest, optionally with Content-Encoding zstd or gzip.",
        "content": {"application/x-protobuf": {"schema": {"type": "string", "format": "binary"}}},
    }
}


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


def _request_schemas() -> dict[str, Any]:
    bodies = [(model, "validation") for model in requests.Request.__subclasses__()]
    _, definitions = models_json_schema(bodies, ref_template=_REFERENCE)  # type: ignore[arg-type]
    schemas: dict[str, Any] = definitions["$defs"]
    return schemas
