"""The cookie of the console, and the middleware that accepts it in place of a key."""

from __future__ import annotations

import hmac

from fastapi import Request, Response
from starlette.datastructures import Headers
from starlette.requests import cookie_parser
from starlette.types import ASGIApp, Receive, Scope, Send

from tinsmith_server.errors import AuthenticationFailed, TinsmithError
from tinsmith_server.routes.http.middleware import key_in
from tinsmith_server.routes.http.problems import http_status, problem
from tinsmith_server.services.assembly import Services

COOKIE = "tinsmith_console"
CSRF_HEADER = "x-csrf-token"
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
NOT_BY_THE_CONSOLE = (
    "a call with the cookie of the console needs the header X-CSRF-Token with the csrf_token of GET /console/session; "
    "a program sends its key in X-API-Key instead"
)


class ConsoleCookies:
    """Middleware that turns the console's cookie into the header of a key.

    All later parts then treat the session's token like every other token. A header with a key has precedence. The
    cookie is ignored in this case, and if it contains anything else than the token of a session that has not ended.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (token := _token_in(headers := Headers(scope=scope))):
            services: Services = scope["app"].state.services
            try:
                expected = await services.console_sessions.csrf_token_of(token)
            except AuthenticationFailed:
                expected = None
            except TinsmithError as error:
                await problem(http_status(error), str(error))(scope, receive, send)
                return
            if expected is not None:
                if scope["method"] not in SAFE_METHODS and not _is_equal(expected, headers.get(CSRF_HEADER, "")):
                    await problem(403, NOT_BY_THE_CONSOLE)(scope, receive, send)
                    return
                others = [(name, value) for name, value in scope["headers"] if name != b"x-api-key"]
                scope["headers"] = [*others, (b"x-api-key", token.encode())]
        await self._app(scope, receive, send)


def _is_equal(expected: str, sent: str) -> bool:
    """Compare two secrets in a time that does not depend on their content."""
    return hmac.compare_digest(expected.encode(), sent.encode())


def _token_in(headers: Headers) -> str | None:
    """Return the token of the cookie, or None if there is no cookie, or if a key has precedence."""
    if "cookie" not in headers or key_in(headers):
        return None
    return cookie_parser(headers["cookie"]).get(COOKIE)


def set_cookie(request: Request, response: Response, token: str, seconds_left: int) -> None:
    response.set_cookie(
        COOKIE,
        token,
        max_age=seconds_left,
        path=_path(request),
        secure=request.url.scheme == "https",
        httponly=True,
        samesite="strict",
    )


def remove_cookie(request: Request, response: Response) -> None:
    is_https = request.url.scheme == "https"
    response.delete_cookie(COOKIE, path=_path(request), secure=is_https, httponly=True, samesite="strict")


def _path(request: Request) -> str:
    return str(request.scope.get("root_path") or "/")
