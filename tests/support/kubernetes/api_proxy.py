"""Between an operator and the API server: sees every request, and answers some itself; and kubeconfig files for it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web
from kubernetes.aio import config
from kubernetes.aio.client import ApiClient, Configuration
from tinsmith_operator.kube.resources import ApiCall, parse_call

Fault = Callable[[ApiCall], "int | None"]
"""The status to answer with instead of asking the API server; None asks it."""

REASONS = {409: "Conflict", 410: "Expired", 429: "TooManyRequests", 500: "InternalError", 503: "ServiceUnavailable"}


class ApiProxy:
    """A proxy in front of an API server, which fails or delays calls.

    `calls` are the calls that came in, to `paths`, with `queries`. `fault` answers some; `lose_answers_of` forwards
    them and reports a failure. While `hold` is set, calls wait for its event, and `held` has the answer of each, or
    None.
    """

    def __init__(self, server: str, context: ssl.SSLContext) -> None:
        self.calls: list[ApiCall] = []
        self.paths: list[str] = []
        self.queries: list[dict[str, str]] = []
        self.fault: Fault = lambda _call: None
        self.lose_answers_of: Callable[[ApiCall], bool] = lambda _call: False
        self.hold: Callable[[ApiCall], asyncio.Event | None] = lambda _call: None
        self.held: dict[ApiCall, int | None] = {}
        self._server = server
        self._context = context
        self._watches: set[asyncio.Task[Any]] = set()
        self._cuts = 0
        self._session: aiohttp.ClientSession | None = None

    def cut_watches(self) -> None:
        """Every watch ends as when a connection breaks, also one that is just being opened."""
        self._cuts += 1
        for watch in self._watches:
            watch.cancel()

    @asynccontextmanager
    async def serve(self, folder: Path) -> AsyncIterator[Path]:
        """Serve, and yield a kubeconfig that leads here."""
        application = web.Application()
        application.router.add_route("*", "/{path:.*}", self._take)
        runner = web.AppRunner(application, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, ssl=self._context)) as session:
            self._session = session
            yield write_kubeconfig(folder, f"http://127.0.0.1:{runner.addresses[0][1]}")
            self.cut_watches()
        await runner.cleanup()

    async def _take(self, request: web.Request) -> web.StreamResponse:
        call = parse_call(request.method, request.path, request.query.get("watch") == "true")
        cuts = self._cuts
        self.calls.append(call)
        self.paths.append(request.path)
        self.queries.append(dict(request.query))
        status = self.fault(call)
        if status == 410 and call.verb == "watch":
            # What the API server says in the stream, not before it.
            event = {"type": "ERROR", "object": {"kind": "Status", "code": 410, "reason": REASONS[410]}}
            return web.Response(body=json.dumps(event) + "\n", content_type="application/json")
        if status is not None:
            return refusal(status)
        if (let_go := self.hold(call)) is not None:
            self.held[call] = None
            await let_go.wait()
        assert self._session is not None
        headers = {name: request.headers[name] for name in ("Content-Type", "Accept") if name in request.headers}
        upstream = self._session.request(
            request.method,
            f"{self._server}{request.rel_url}",
            data=await request.read() or None,
            headers=headers,
            skip_auto_headers=["Content-Type"],
        )
        async with upstream as answer:
            if call.verb == "watch":
                return await self._stream(request, answer, was_cut=lambda: self._cuts != cuts)
            body = await answer.read()
        if let_go is not None:
            self.held[call] = answer.status
        if self.lose_answers_of(call):
            return refusal(500)
        return web.Response(body=body, status=answer.status, content_type="application/json")

    async def _stream(
        self, request: web.Request, answer: aiohttp.ClientResponse, was_cut: Callable[[], bool]
    ) -> web.StreamResponse:
        response = web.StreamResponse(status=answer.status, headers={"Content-Type": "application/json"})
        await response.prepare(request)
        if was_cut():
            return response
        copying = asyncio.create_task(copy(answer, response))
        self._watches.add(copying)
        with contextlib.suppress(asyncio.CancelledError, aiohttp.ClientError, ConnectionError):
            await copying
        self._watches.discard(copying)
        return response


async def copy(answer: aiohttp.ClientResponse, response: web.StreamResponse) -> None:
    async for part in answer.content.iter_any():
        await response.write(part)


def refusal(status: int) -> web.Response:
    body = {"kind": "Status", "status": "Failure", "code": status, "reason": REASONS[status], "message": "injected"}
    return web.Response(body=json.dumps(body), status=status, content_type="application/json")


@asynccontextmanager
async def proxy_to(kubeconfig: Path) -> AsyncIterator[ApiProxy]:
    """Proxy to the API server with the administrator's credentials."""
    configuration = Configuration()
    await config.load_kube_config(config_file=str(kubeconfig), client_configuration=configuration)  # type: ignore[no-untyped-call]
    async with ApiClient(configuration) as client:
        yield ApiProxy(configuration.host, client.rest_client.ssl_context)


def write_kubeconfig(folder: Path, server: str) -> Path:
    """Write a kubeconfig for a server without TLS. The token is read from the file `token` in its folder."""
    (folder / "token").touch()
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "test",
        "clusters": [{"name": "test", "cluster": {"server": server}}],
        "users": [{"name": "test", "user": {"tokenFile": str(folder / "token")}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
    }
    file = folder / "kubeconfig"
    file.write_text(json.dumps(document))
    return file
