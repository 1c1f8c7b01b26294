"""Table rows for the calls and fields of the API. The rows come from the server's OpenAPI document."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fastapi import FastAPI
from tinsmith_server.app import ROUTES
from tinsmith_server.routes.http.dependencies import API_PREFIX
from tinsmith_server.routes.http.openapi import install_openapi
from tinsmith_server.wire.needs import Needs
from tinsmith_server.wire.responses import ClientConfigResponse, DynamicConfigResponse

CALL_HEADER = ("Call", "Required fields")
FLAG_HEADER = ("Flag", "From", "Value")
JSON = "application/json"


def call_rows() -> Iterator[tuple[str, ...]]:
    """Return each call and the required fields of the call.

    The calls are in the order in which a server matches paths.
    """
    document = _document()
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            yield _call(method, path), _taken(document, operation)


def flag_rows() -> Iterator[tuple[str, ...]]:
    """Return the flags in the two configurations of the SDK, each with a value or a rule for the value."""
    models = {"client/config": ClientConfigResponse, "client/dynamic_config": DynamicConfigResponse}
    for call, model in models.items():
        for name, field in model.model_fields.items():
            computed = field.description or "a setting"
            said = computed if field.is_required() else f"`{str(field.default).lower()}`"
            yield f"`{name}`", f"`{call}`", said


def needs() -> str:
    """Return the needs that a program can name. The OpenAPI document describes them."""
    return ", ".join(f"`{name}`" for name in Needs.model_fields)


def _document() -> dict[str, Any]:
    app = FastAPI(routes=ROUTES)
    install_openapi(app)
    return app.openapi()


def _call(method: str, path: str) -> str:
    return f"`{method.upper()} {path.removeprefix(API_PREFIX)}`"


def _taken(document: Mapping[str, Any], operation: Mapping[str, Any]) -> str:
    """Return the required fields in the body, in the query and in the headers."""
    parameters = [one for one in operation.get("parameters", []) if one["in"] != "path" and one["required"]]
    names = [f"{one['name']} ({one['in']})" for one in parameters]
    content = operation.get("requestBody", {}).get("content", {})
    for media_type, body in content.items():
        names += _required(document, body["schema"]) if media_type == JSON else [media_type]
    return ", ".join(names)


def _required(document: Mapping[str, Any], schema: Mapping[str, Any]) -> list[str]:
    """Return the names of an object's required fields, or the required fields of each alternative object."""
    resolved = _resolved(document, schema)
    if choices := resolved.get("anyOf") or resolved.get("oneOf"):
        return list(dict.fromkeys(name for choice in choices for name in _required(document, choice)))
    return list(resolved.get("required", []))


def _resolved(document: Mapping[str, Any], schema: Mapping[str, Any]) -> Mapping[str, Any]:
    if "$ref" not in schema:
        return schema
    found: Mapping[str, Any] = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    return found
