"""Health and metrics over HTTP, for the kubelet and Prometheus.

Both the leader and the standby operators serve health and metrics.
"""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Self

from aiohttp import web

from tinsmith_operator.metrics import CONTENT_TYPE

Check = Callable[[], str | None]
"""A function that returns what is missing, or None if nothing is missing."""

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


class HealthServer:
    """An HTTP server that runs inside `async with`. For port 0, the server chooses a free port."""

    def __init__(
        self,
        health_port: int,
        metrics_port: int,
        alive: Check,
        ready: Check,
        metrics: Callable[[], bytes],
        *,
        remarks: Callable[[], list[str]] = list,
    ) -> None:
        """Prepare the server. `remarks` are lines that `/readyz` shows even if the operator is ready."""
        self.health_port = health_port
        self.metrics_port = metrics_port
        self._health = web.Application()
        self._health.router.add_get("/healthz", _answer(alive))
        self._health.router.add_get("/readyz", _answer(ready, remarks))
        self._metrics = web.Application()
        self._metrics.router.add_get("/metrics", _page(metrics))
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        self.health_port = await self._serve(self._health, self.health_port)
        self.metrics_port = await self._serve(self._metrics, self.metrics_port)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def _serve(self, application: web.Application, port: int) -> int:
        runner = web.AppRunner(application, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        self._stack.push_async_callback(runner.cleanup)
        await web.SockSite(runner, _listen(port)).start()
        bound: int = runner.addresses[0][1]
        return bound


def _listen(port: int) -> socket.socket:
    """Return one socket that accepts connections over IPv4 and IPv6.

    For port 0, asyncio would open two sockets with different ports.
    """
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def _answer(check: Check, remarks: Callable[[], list[str]] = list) -> Answer:
    async def answer(_request: web.Request) -> web.Response:
        missing = check()
        if missing:
            return web.Response(text=missing, status=503)
        return web.Response(text="\n".join(["ok", *remarks()]))

    return answer


def _page(render: Callable[[], bytes]) -> Answer:
    async def page(_request: web.Request) -> web.Response:
        return web.Response(body=render(), headers={"Content-Type": CONTENT_TYPE})

    return page
