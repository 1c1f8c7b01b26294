"""Base URLs of the dialects: the short one, `/v1`, and what a client with a wrong one is told."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import APIRouter, Request
from starlette._utils import get_route_path  # what the router goes by: the path below a root path
from starlette.types import ASGIApp, Receive, Scope, Send

from tinsmith_server.errors import NotFound
from tinsmith_server.routes.dependencies import API_PREFIX
from tinsmith_server.services.assembly import Services

SHORT = "/v1"
OPENAI = "/oai/api/v1"
ANTHROPIC = "/anthropic/api/v1"
ANTHROPIC_CALLS = ("/messages", "/messages/count_tokens")
VERSION_HEADER = b"anthropic-version"
"""The header that every client of Anthropic sends."""
METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE"]
_SENT_PATH = "tinsmith.sent_path"


def full_path(path: str, *, by_anthropic: bool = False) -> str:
    """Return the path of the route that a path below `/v1` stands for, or `path` itself.

    Clients of OpenAI and of Anthropic both expect their calls there, and have no call of the same name but `models`:
    `by_anthropic` decides that.
    """
    if path != SHORT and not path.startswith(f"{SHORT}/"):
        return path
    call = path.removeprefix(SHORT)
    lists_models = call == "/models" or call.startswith("/models/")
    return f"{ANTHROPIC if call in ANTHROPIC_CALLS or (by_anthropic and lists_models) else OPENAI}{call or '/'}"


class ShortPaths:
    """Rewrites the path before it is routed: limits of bodies, rates and metrics then know one route, not two."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            sent = get_route_path(scope)
            by_anthropic = sent.startswith(SHORT) and any(name == VERSION_HEADER for name, _ in scope["headers"])
            if (path := full_path(sent, by_anthropic=by_anthropic)) != sent:
                scope[_SENT_PATH] = scope["path"]
                scope["path"] = path = scope["path"].removesuffix(sent) + path
                scope["raw_path"] = path.encode()
        await self._app(scope, receive, send)


def base_url(request: Request, path: str) -> str:
    """Return the URL of `path` at the setting `public_url`, or at the address that the client used."""
    services: Services = request.app.state.services
    base = services.settings.public_url or str(request.base_url)
    return f"{base.rstrip('/')}{path}"


def add_not_here(router: APIRouter, paths: Sequence[str], calls: str, base_path: str) -> None:
    """Answer `paths`, behind all other routes, in the form of the router's dialect and with the right base URL.

    `calls` are those that exist below `base_path`.
    """

    async def not_here(request: Request) -> None:
        path = request.scope.get(_SENT_PATH, request.url.path)
        right = base_url(request, base_path)
        raise NotFound(
            f"{request.method} {path} is no call of this server, which has {calls}; the client's base URL is {right}"
        )

    for path in paths:
        router.add_api_route(path, not_here, methods=METHODS, include_in_schema=False)


def misplaced(*calls: str) -> list[str]:
    """Return where these calls arrive from a client whose base URL is the server's address, or Tinker's own."""
    return [f"{prefix}{call}" for prefix in ("", API_PREFIX) for call in calls]
