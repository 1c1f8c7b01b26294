"""The common parts of both stand-ins: flags, a web server that notices disconnects, and routes for tests."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from aiohttp import web

from .computing import Computer

Body = dict[str, Any]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Hand:
    """Routes for tests: which request waits, and which run."""

    def __init__(self, computer: Computer) -> None:
        self._computer = computer
        self.running = 0
        self.is_sick = False

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/stand-in/hold", self._hold),
            web.post("/stand-in/release", self._release),
            web.post("/stand-in/sicken", self._sicken),
            web.post("/stand-in/heal", self._heal),
            web.get("/health", self._health),
            web.get("/stand-in/state", self._state),
        ]

    def counted(self, handler: Handler) -> Handler:
        async def counting(request: web.Request) -> web.StreamResponse:
            self.running += 1
            try:
                if self.is_sick:
                    raise web.HTTPInternalServerError(text="EngineDeadError")
                return await handler(request)
            finally:
                self.running -= 1

        return counting

    async def _hold(self, request: web.Request) -> web.Response:
        self._computer.may_go_on.clear()
        return web.Response()

    async def _release(self, request: web.Request) -> web.Response:
        self._computer.may_go_on.set()
        return web.Response()

    async def _sicken(self, request: web.Request) -> web.Response:
        self.is_sick = True
        return web.Response()

    async def _heal(self, request: web.Request) -> web.Response:
        self.is_sick = False
        return web.Response()

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=503 if self.is_sick else 200)

    async def _state(self, request: web.Request) -> web.Response:
        state = {"running": self.running, "adapters": self._computer.adapters}
        return web.json_response(state)


def known_fields(body: Body, known: set[str], what: str) -> None:
    """Refuse unknown fields. The real servers ignore them, which would hide an error of ours."""
    if unknown := set(body) - known:
        raise web.HTTPBadRequest(text=f"the {what} has fields that are not known: {sorted(unknown)}")


class UnderWay:
    """The requests that are computed at the same time: what one asks for can harm another's answer."""

    def __init__(self) -> None:
        self._met: list[tuple[Body, list[Body]]] = []

    @contextmanager
    def having(self, body: Body) -> Iterator[list[Body]]:
        """Yield the other requests that it meets, more and more of them during the block."""
        mine = (body, [other for other, _ in self._met])
        for _, met in self._met:
            met.append(body)
        self._met.append(mine)
        try:
            yield mine[1]
        finally:
            self._met = [entry for entry in self._met if entry is not mine]


BACKLOG = 2048
"""uvicorn's, which both servers run under. A connection beyond it fails at a Unix socket, where TCP would wait."""


def run(
    routes: list[web.RouteDef], host: str | None = None, port: int | None = None, uds: str | None = None, key: str = ""
) -> None:
    """Serve at a port, or at the Unix socket `uds`. With a `key` nothing but health, and a test's hand, needs none."""
    app = web.Application(middlewares=[_guarded_by(key)] if key else [])
    app.add_routes(routes)
    print_line = partial(print, flush=True)
    # Else a client that leaves is not noticed.
    web.run_app(app, host=host, port=port, path=uds, backlog=BACKLOG, handler_cancellation=True, print=print_line)


def _guarded_by(key: str) -> Any:
    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        is_open = request.path == "/health" or request.path.startswith("/stand-in/")
        if not is_open and request.headers.get("Authorization") != f"Bearer {key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        return await handler(request)

    return guard
