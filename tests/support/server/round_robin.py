"""An ingress in a few lines: each request goes to the next backend, whichever connection it came by."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import aiohttp
from aiohttp import web

START_SECONDS = 60.0
# Above any hold of a poll.
ANSWER_SECONDS = 60.0
NOT_PASSED_ON = {"host", "connection", "content-length", "transfer-encoding"}


@dataclass(frozen=True, slots=True)
class Ingress:
    """Where it listens."""

    url: str


@contextmanager
def round_robin(backends: Sequence[str]) -> Iterator[Ingress]:
    """In a thread of its own. A backend that refuses the connection is passed over; one that breaks off
    in the middle of a request is a 502, as at any ingress: nobody knows what it has done."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="round robin")
    thread.start()
    proxy = _Proxy(backends)
    try:
        port = asyncio.run_coroutine_threadsafe(proxy.start(), loop).result(START_SECONDS)
        yield Ingress(f"http://127.0.0.1:{port}")
    finally:
        asyncio.run_coroutine_threadsafe(proxy.stop(), loop).result(START_SECONDS)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


class _Proxy:
    def __init__(self, backends: Sequence[str]) -> None:
        self._backends = backends
        self._turns = itertools.cycle(range(len(backends)))
        self._session: aiohttp.ClientSession | None = None
        self._runner: web.AppRunner | None = None

    async def start(self) -> int:
        timeout = aiohttp.ClientTimeout(total=ANSWER_SECONDS)
        # Without kept connections: one that a dead backend has left is known as such only when it is used.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        self._session = aiohttp.ClientSession(timeout=timeout, connector=connector, auto_decompress=False)
        application = web.Application(client_max_size=2**30)
        application.router.add_route("*", "/{path:.*}", self._pass_on)
        self._runner = web.AppRunner(application, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        port: int = self._runner.addresses[0][1]
        return port

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
        if self._session is not None:
            await self._session.close()

    async def _pass_on(self, request: web.Request) -> web.Response:
        body = await request.read()
        first = next(self._turns)
        for backend in [*self._backends[first:], *self._backends[:first]]:
            try:
                return await self._ask(backend, request, body)
            except aiohttp.ClientConnectorError:
                continue
            except (aiohttp.ClientError, TimeoutError) as error:
                return web.Response(status=502, text=f"the backend broke off: {error!r}")
        return web.Response(status=503, text="no backend takes connections")

    async def _ask(self, backend: str, request: web.Request, body: bytes) -> web.Response:
        assert self._session is not None
        headers = {name: value for name, value in request.headers.items() if name.lower() not in NOT_PASSED_ON}
        target = f"{backend}{request.rel_url}"
        async with self._session.request(
            request.method, target, data=body, headers=headers, skip_auto_headers=["Content-Type"]
        ) as answer:
            content = await answer.read()
            kept = {name: value for name, value in answer.headers.items() if name.lower() not in NOT_PASSED_ON}
            return web.Response(status=answer.status, body=content, headers=kept)
