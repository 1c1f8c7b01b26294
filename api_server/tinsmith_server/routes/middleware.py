"""Around every request: ids in the log, counters, and one last net for errors."""

from __future__ import annotations

import re
import time
import uuid

import structlog
from starlette._utils import get_route_path  # what the router goes by: the path below a root path
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tinsmith_server.logs import get_logger
from tinsmith_server.metrics.server import Metrics
from tinsmith_server.routes.problems import problem

log = get_logger(__name__)

# Whoever has one may read or write a file, without a key.
LINKS = re.compile(r"(?<=/uploads/)[^/]+|(?<=/downloads/)[^/]+|(?<=/archives/)[^/]+|(?<=/traces/)[^/]+")


class _HeadIsComplete(Exception):
    """Ends an application that would send a body although HEAD has none."""


class HeadRequests:
    """Answer HEAD as GET without its body, on every route: monitors and load balancers ask with it.

    A streamed body ends before its first part: an archive of gigabytes would be read and compressed for nothing.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def without_body(message: Message) -> None:
            if message["type"] != "http.response.body":
                await send(message)
                return
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            if message.get("more_body", False):
                raise _HeadIsComplete

        asked = {**scope, "method": "GET"}  # a copy: the server leaves the body out by the method of its own
        try:
            await self._app(asked, receive, without_body)
        except _HeadIsComplete:
            pass
        finally:
            scope.update(asked, method="HEAD")  # the route, by which requests are counted


class Observing:
    """Plain ASGI: a thousand held polls pay for nothing they do not use."""

    def __init__(self, app: ASGIApp, metrics: Metrics, pages: frozenset[str]) -> None:
        """`pages` are the paths that FastAPI serves itself, without saying so in the scope."""
        self._app = app
        self._metrics = metrics
        self._pages = pages

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        structlog.contextvars.clear_contextvars()
        structlog.contextvars.bind_contextvars(http_request_id=uuid.uuid4().hex[:12])
        started, status = time.monotonic(), 0

        async def noting_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noting_status)
        except ClientDisconnect:
            status = 499
        except Exception:
            log.exception("request crashed")
            if status:
                raise
            await problem(500, "an error inside the server; its log says more")(scope, receive, noting_status)
        finally:
            seconds = time.monotonic() - started
            self._metrics.note_request(self._route(scope), status, seconds)
            log.debug(
                "request",
                method=scope["method"],
                path=without_links(scope["path"]),
                status=status,
                seconds=round(seconds, 4),
            )

    def _route(self, scope: Scope) -> str:
        """The template, never the path: ids would make as many time series."""
        path = get_route_path(scope)
        if path in self._pages:
            return path
        return getattr(scope.get("route"), "path", "unknown")


def without_links(path: str) -> str:
    return LINKS.sub("…", path)
