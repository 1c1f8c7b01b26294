"""Middleware around every request: IDs in the log, metrics, the last error handler, and access rules."""

from __future__ import annotations

import re
import time
import uuid
from collections import Counter
from collections.abc import Collection
from urllib.parse import urlsplit

import structlog
from starlette._utils import get_route_path  # the path without the root path, as the router uses it
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from tinsmith_rpc import tracing

from tinsmith_server.errors import AuthenticationFailed
from tinsmith_server.logs import get_logger
from tinsmith_server.metrics.server import Metrics
from tinsmith_server.routes.http.problems import problem
from tinsmith_server.services.accounts.callers import act_as
from tinsmith_server.services.assembly import Services
from tinsmith_server.settings import Settings, is_loopback

log = get_logger(__name__)

# These links allow reading or writing a file without a key.
LINKS = re.compile(r"(?<=/uploads/)[^/]+|(?<=/downloads/)[^/]+|(?<=/archives/)[^/]+|(?<=/traces/)[^/]+")


class _HeadIsComplete(Exception):
    """A signal that ends an application before it sends a body as the answer to HEAD."""


class HeadRequests:
    """Middleware that answers HEAD like GET, but without a body, on every route.

    Monitors and load balancers use HEAD. A streamed body is stopped before its first part. Without this stop, gigabytes
    of an archive would be read and compressed for no use.
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

        get_scope = {**scope, "method": "GET"}  # copied, because the server needs the original method to drop the body
        try:
            await self._app(get_scope, receive, without_body)
        except _HeadIsComplete:
            pass
        finally:
            scope.update(get_scope, method="HEAD")  # the route, which request metrics need


class Observing:
    """Middleware for logs and metrics. The middleware is plain ASGI, so that thousands of held polls cost little."""

    def __init__(self, app: ASGIApp, metrics: Metrics, pages: frozenset[str]) -> None:
        """Wrap the application.

        `pages` are the paths of pages that FastAPI serves itself. FastAPI's own pages have no route in the scope.
        """
        self._app = app
        self._metrics = metrics
        self._pages = pages

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        structlog.contextvars.clear_contextvars()
        act_as(None)
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
            await problem(500, "internal server error; see the server's log")(scope, receive, noting_status)
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
        """Return the template of the route, because a path contains IDs and would create too many time series."""
        path = get_route_path(scope)
        if path in self._pages:
            return path
        return getattr(scope.get("route"), "path", "unknown")


# The SDK polls and reports by itself, hundreds of times for one step.
UNTRACED = ("/api/v1/retrieve_future", "/api/v1/session_heartbeat", "/api/v1/client/", "/api/v1/telemetry")
UNTRACED_PAGES = ("/", "/health", "/metrics")
TRACED_IDS = ("session_id", "model_id")


class Tracing:
    """Middleware for traces. A client continues its own trace by the header `traceparent`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith(UNTRACED) or scope["path"] in UNTRACED_PAGES:
            await self._app(scope, receive, send)
            return
        method, parent = scope["method"], Headers(scope=scope).get(tracing.TRACEPARENT, "")
        with tracing.span(str(method), parent, is_server=True) as notes:

            async def noting_status(message: Message) -> None:
                if message["type"] == "http.response.start":
                    notes.attributes["http.response.status_code"] = message["status"]
                    notes.failure = f"status {message['status']}" if message["status"] >= 500 else ""
                await send(message)

            try:
                await self._app(scope, receive, noting_status)
            finally:
                route = getattr(scope.get("route"), "path", "")
                notes.name = f"{method} {route}".strip()
                notes.attributes |= {"http.request.method": str(method), "http.route": str(route)}
                ids = structlog.contextvars.get_contextvars()
                notes.attributes |= {f"tinsmith.{name}": str(ids[name]) for name in TRACED_IDS if name in ids}


def without_links(path: str) -> str:
    return LINKS.sub("…", path)


METRICS_PATH = "/metrics"
POLL_PATHS = frozenset({"/api/v1/retrieve_future", "/api/v1/retrieve_futures"})
# Headers that begin with `x-forwarded` are checked as well.
FORWARDING_HEADERS = frozenset(
    {"cdn-loop", "cf-connecting-ip", "forwarded", "true-client-ip", "via", "x-client-ip", "x-real-ip"}
)
POLL_BY_PATH = "/api/v1/retrieve_future/"


class LoopbackOnly:
    """Middleware for a server without keys. The middleware refuses every request that does not come from this machine.

    The settings do not always contain the address on which the server listens. So the connection and the headers of
    each request are checked.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (why := foreign_request_reason(scope)) is not None:
            await problem(403, f"keys are off (setting require_keys), so only this machine has access: {why}")(
                scope, receive, send
            )
        else:
            await self._app(scope, receive, send)


def foreign_request_reason(scope: Scope) -> str | None:
    """Return the reason if a request does not come directly from a program on this machine, otherwise None.

    A proxy on this machine may forward requests from other machines. A web page may also make a local browser send a
    request, across sites or by a host name that resolves to this machine.
    """
    headers = Headers(scope=scope)
    ends = [scope.get("server"), scope.get("client")]
    if not all(end and is_loopback(str(end[0])) for end in ends):
        return "this request came over an address that other machines can reach; turn keys on, or listen on 127.0.0.1"
    if forwarded := sorted(name for name in headers if name in FORWARDING_HEADERS or name.startswith("x-forwarded")):
        return f"this request came through a proxy, since it has the header {forwarded[0]}; turn keys on"
    if not _names_this_machine(f"//{headers.get('host', '')}"):
        return "this request uses another host name than localhost or the loopback address"
    if "origin" in headers and not _names_this_machine(headers["origin"]):
        return "this request was sent by a web page of another site"
    if headers.get("sec-fetch-site") == "cross-site":
        return "this request was sent by a web page of another site"
    return None


def _names_this_machine(url: str) -> bool:
    try:
        return is_loopback(urlsplit(url).hostname or "")
    except ValueError:
        return False


def pages_are_open(settings: Settings, scope: Scope) -> bool:
    """Return whether this request may see the pages. By default, server and client must be on this machine."""
    if settings.pages_need_key != "auto":
        return settings.pages_need_key == "never"
    return settings.listens_here_alone and foreign_request_reason(scope) is None


class PageAuth:
    """Middleware that requires a key for the pages. The metrics port serves only metrics, and requires no key."""

    def __init__(self, app: ASGIApp, settings: Settings, pages: Collection[str]) -> None:
        self._app = app
        self._pages = frozenset(pages)
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (refusal := await self._refusal(scope)) is not None:
            await problem(*refusal)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        port = (scope.get("server") or ("", None))[1]
        metrics_port = self._settings.metrics_port
        if metrics_port is not None and port == metrics_port:
            return None if get_route_path(scope) == METRICS_PATH else (404, f"this port serves only {METRICS_PATH}")
        if get_route_path(scope).rstrip("/") not in self._pages or pages_are_open(self._settings, scope):
            return None
        try:
            await scope["app"].state.services.keys.authenticate(key_in(Headers(scope=scope)))
        except AuthenticationFailed as error:
            return 401, f"{scope['path']} needs a key in X-API-Key (setting pages_need_key): {error}"
        return None


def key_in(headers: Headers) -> str | None:
    """Return the key. Without additional configuration, Prometheus can send only `Authorization`."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return headers.get("x-api-key") or (token if scheme.lower() == "bearer" else None)


class AddressLimit:
    """Middleware that limits the number of requests in flight for each address behind trusted proxies."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app = app
        self._limit = settings.connections_per_address if settings.trusted_proxies else None
        self._in_flight: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        client = scope.get("client")
        if self._limit is None or scope["type"] != "http" or not client:
            await self._app(scope, receive, send)
            return
        address = client[0]
        if self._in_flight[address] >= self._limit:
            detail = f"{self._limit} requests from {address} are in flight (setting connections_per_address)"
            refusal = problem(429, detail)
            refusal.headers["retry-after"] = "1"
            await refusal(scope, receive, send)
            return
        self._in_flight[address] += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._in_flight[address] -= 1
            if not self._in_flight[address]:
                del self._in_flight[address]


class ConcurrencyLimit:
    """Middleware that limits how many requests of one tenant run in the event loop.

    Requests without a known key are limited by client address instead. A poll uses its slot only for its first step,
    because thousands of polls may wait.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        services: Services = scope["app"].state.services
        key, client = key_in(Headers(scope=scope)), scope.get("client") or ("",)
        tenant = services.keys.owner(key) if key else None
        path = get_route_path(scope)
        owner, is_poll = tenant or str(client[0]), path in POLL_PATHS or path.startswith(POLL_BY_PATH)
        is_other = tenant is not None and not is_poll
        async with services.admission.slots.slot(owner, is_other=is_other, may_wait=not is_poll):
            await self._app(scope, receive, send)
