"""Table rows for the calls and fields of the API. The rows come from the server's OpenAPI document."""

from __future__ import annotations

from collections.abc import Iterator

from fastapi import FastAPI
from tinsmith_server.app import ROUTES
from tinsmith_server.routes.http.dependencies import API_PREFIX
from tinsmith_server.routes.http.openapi import install_openapi
from tinsmith_server.wire.needs import Needs
from tinsmith_server.wire.responses import ClientConfigResponse, DynamicConfigResponse

CALL_HEADER = ("Path", "Methods")
FLAG_HEADER = ("Flag", "From", "Value")


def call_rows() -> Iterator[tuple[str, ...]]:
    """Return each path and its methods. The paths are in the order in which a server matches them."""
    app = FastAPI(routes=ROUTES)
    install_openapi(app)
    for path, operations in app.openapi()["paths"].items():
        yield f"`{path.removeprefix(API_PREFIX)}`", ", ".join(method.upper() for method in operations)


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
