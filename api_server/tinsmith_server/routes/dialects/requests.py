"""Routes of a dialect: bodies that may be conversations, errors in the form of the dialect, and base URLs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from fastapi import APIRouter, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ValidationError
from starlette._utils import get_route_path  # the path without the root path, as the router uses it
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send
from typing_extensions import override

from tinsmith_server.errors import NotFound, TinsmithError, TooBusy, Unprocessable
from tinsmith_server.logs import get_logger, redact
from tinsmith_server.routes.http.bodies import whole_body
from tinsmith_server.routes.http.dependencies import API_PREFIX, ApiKey, ServicesDep, Tenant
from tinsmith_server.routes.http.openapi import PROBLEMS
from tinsmith_server.routes.http.planned_route import Handler, PlannedRoute
from tinsmith_server.routes.http.problems import faults_of, http_status
from tinsmith_server.routes.http.uploads import AccountDep
from tinsmith_server.services.assembly import Services
from tinsmith_server.wire.dialects.texts import CONVERSATION
from tinsmith_server.wire.json_bodies import BadJson, read_object, sentence
from tinsmith_server.wire.requests import Request as Body

log = get_logger(__name__)

M = TypeVar("M", bound=Body)

Problem = Callable[[int, str], dict[str, Any]]
"""A function that makes an error body of the dialect from a status and a message."""

# Other clients take a 422 for an error of their own validation, and do not show its message.
BAD_REQUEST = 400


STREAMS: dict[int | str, dict[str, Any]] = {
    200: {"content": {"application/json": {}, "text/event-stream": {"schema": {"type": "string"}}}}
}
"""The OpenAPI `responses` of a route with an answer that may be a stream."""


def problems_as(model: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """Return the OpenAPI `responses` of a dialect's router."""
    return {status: {"model": model, "description": "The error."} for status in PROBLEMS}


class DialectRoute(PlannedRoute):
    """A route that answers errors in the form that clients of the dialect understand."""

    problem: Problem

    @override
    def around(self, handle: Handler) -> Handler:
        async def handled(request: Request) -> Response:
            try:
                return await handle(request)
            except TinsmithError as error:
                return _error_response(error, self.problem)
            except RequestValidationError as error:
                return JSONResponse(self.problem(BAD_REQUEST, redact(faults_of(error))), BAD_REQUEST)
            except HTTPException as error:
                return JSONResponse(self.problem(error.status_code, str(error.detail)), error.status_code)

        return handled


def status_of(error: TinsmithError) -> int:
    status = http_status(error)
    return BAD_REQUEST if isinstance(error, Unprocessable) else status


def _error_response(error: TinsmithError, problem: Problem) -> Response:
    status = status_of(error)
    if status >= 500:
        log.warning("request failed", status=status, reason=str(error))
    response = JSONResponse(problem(status, redact(str(error))), status)
    if isinstance(error, TooBusy):
        response.headers["retry-after"] = str(round(error.retry_after_seconds))
    return response


def conversation_as(model: type[M], *, samples: bool = True) -> Callable[..., Awaitable[M]]:
    """Return a dependency that reads the body.

    `samples` is True for requests that sample tokens. Requests that sample tokens are limited by the rate of the key.
    The dependency raises BodyTooLarge, TooBusy and Unprocessable.
    """

    async def read(request: Request, tenant: Tenant, services: ServicesDep, account: AccountDep, key: ApiKey) -> M:
        if samples:
            services.admission.admit_sample(key)
        body = await whole_body(request, services, account)
        try:
            return await services.admission.off_the_loop(
                tenant, len(body), lambda: model.model_validate(read_object(body, CONVERSATION))
            )
        except BadJson as error:
            raise Unprocessable(str(error)) from error
        except ValidationError as error:
            raise Unprocessable(sentence(error)) from error

    return read


SHORT = "/v1"
OPENAI = "/oai/api/v1"
RECORDED = "/oai/recordings/{recording_id}/v1"
"""The path of an agent's calls, whose turns are recorded."""
ANTHROPIC = "/anthropic/api/v1"
ANTHROPIC_CALLS = ("/messages", "/messages/count_tokens")
VERSION_HEADER = b"anthropic-version"
"""The header that every Anthropic client sends."""
METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE"]
_SENT_PATH = "tinsmith.sent_path"


def full_path(path: str, *, by_anthropic: bool = False) -> str:
    """Return the route's full path for a path below `/v1`, or `path` unchanged.

    Both OpenAI's and Anthropic's clients call paths below `/v1`. Both dialects have the path `models`, for which
    `by_anthropic` selects the dialect.
    """
    if path != SHORT and not path.startswith(f"{SHORT}/"):
        return path
    call = path.removeprefix(SHORT)
    lists_models = call == "/models" or call.startswith("/models/")
    return f"{ANTHROPIC if call in ANTHROPIC_CALLS or (by_anthropic and lists_models) else OPENAI}{call or '/'}"


class ShortPaths:
    """Middleware that rewrites a short path before routing.

    Limits and metrics then know only one route for the short and the full path.
    """

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
    """Return the URL of `path` below the setting `public_url`, or below the address that the client used."""
    services: Services = request.app.state.services
    base = services.settings.public_url or str(request.base_url)
    return f"{base.rstrip('/')}{path}"


def add_not_here(router: APIRouter, paths: Sequence[str], calls: str, base_path: str) -> None:
    """Add routes for wrong paths, after all other routes.

    The added routes answer with the right base URL in the dialect's form. `calls` are the names of the calls below
    `base_path`, which may have the parameters of the path.
    """

    async def not_here(request: Request) -> None:
        path = request.scope.get(_SENT_PATH, request.url.path)
        right = base_url(request, base_path.format_map(request.path_params))
        raise NotFound(
            f"{request.method} {path} is not a call of this server, which has {calls}; set the client's base URL to "
            f"{right}"
        )

    for path in paths:
        router.add_api_route(path, not_here, methods=METHODS, include_in_schema=False)


def misplaced(*calls: str) -> list[str]:
    """Return the paths of these calls from clients that have the server's address or Tinker's URL as base URL."""
    return [f"{prefix}{call}" for prefix in ("", API_PREFIX) for call in calls]
