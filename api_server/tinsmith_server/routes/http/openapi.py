"""The OpenAPI document.

The document extends FastAPI's document by the bodies that routes read themselves, and by errors.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from tinsmith_server.routes.http.problems import HTTP_STATUS
from tinsmith_server.wire import requests
from tinsmith_server.wire.json_training import ForwardBackwardBody

_REFERENCE = "#/components/schemas/{model}"

TRAINING_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "description": "Tinker's ForwardBackwardRequest, optionally with Content-Encoding zstd or gzip; or the same in "
        "JSON, as SDKs below 0.19 send it.",
        "content": {
            "application/x-protobuf": {"schema": {"type": "string", "format": "binary"}},
            "application/json": {"schema": {"$ref": _REFERENCE.format(model=ForwardBackwardBody.__name__)}},
        },
    }
}


def takes(model: type[BaseModel]) -> dict[str, Any]:
    """Return the `openapi_extra` of a route that reads this JSON body."""
    schema = {"$ref": _REFERENCE.format(model=model.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def install_openapi(app: FastAPI) -> None:
    """Serve the generated document.

    The document includes the schemas that `takes` refers to, and the errors of every operation.
    """

    def openapi() -> dict[str, Any]:
        if not app.openapi_schema:
            document = get_openapi(
                title=app.title,
                version=app.version,
                summary=app.summary,
                description=app.description,
                routes=app.routes,
            )
            _add_problems(document)
            document["components"]["schemas"].update(_request_schemas())
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


class Problem(BaseModel):
    """The body of every error: what happened, to what, and what to do."""

    detail: str


_FORM_OF_FASTAPI = ("HTTPValidationError", "ValidationError")
_PROBLEM = {
    "description": "The error.",
    "content": {"application/json": {"schema": {"$ref": _REFERENCE.format(model=Problem.__name__)}}},
}
PROBLEMS = ("4XX", *sorted({str(status) for status in HTTP_STATUS.values() if status > 500}))


def _add_problems(document: dict[str, Any]) -> None:
    """Replace FastAPI's validation errors, because this server's clients never see them.

    Routes of dialects have their own form of errors.
    """
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    for name in _FORM_OF_FASTAPI:
        schemas.pop(name, None)
    schemas[Problem.__name__] = Problem.model_json_schema()
    for operation in (operation for methods in document["paths"].values() for operation in methods.values()):
        operation["responses"].pop("422", None)
        operation["responses"] = dict.fromkeys(PROBLEMS, _PROBLEM) | operation["responses"]


def _all_below(model: type[BaseModel]) -> list[type[BaseModel]]:
    return [found for one in model.__subclasses__() for found in (one, *_all_below(one))]


def _request_schemas() -> dict[str, Any]:
    bodies = [(model, "validation") for model in _all_below(requests.Request)]
    _, definitions = models_json_schema(bodies, ref_template=_REFERENCE)  # type: ignore[arg-type]
    schemas: dict[str, Any] = definitions["$defs"]
    return schemas
