"""The OpenAPI document: what FastAPI finds by itself, and the bodies, which routes read on their own."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from tinsmith_server.wire import requests

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
