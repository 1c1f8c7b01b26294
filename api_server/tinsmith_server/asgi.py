"""The application for other ASGI servers: `uvicorn tinsmith_server.asgi:app`.

Settings come only from the environment. The ASGI server receives the requests. This module opens only the port
`metrics_port`. `tinsmith serve` does more: it limits connections, and releases held polls when it stops. Each process
is a complete server. Several uvicorn workers therefore have the same requirements as several servers.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import uvicorn
from fastapi import FastAPI
from uvicorn.server import ServerState

from tinsmith_server.app import create_app
from tinsmith_server.cli.connections import KEEP_ALIVE_SECONDS, Addresses, BoundedProtocol
from tinsmith_server.cli.serving import listen_for_metrics
from tinsmith_server.configuration import load_settings, notes_on
from tinsmith_server.errors import TinsmithError
from tinsmith_server.logs import configure_logs


def _begin_alone(app: FastAPI, for_metrics: list[socket.socket], addresses: Addresses) -> None:
    """Print the first key of an installation, and serve metrics on a separate port, as `tinsmith serve` does."""
    begin = app.router.lifespan_context

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as opened:
            await opened.enter_async_context(begin(app))
            for listener in for_metrics:
                await opened.enter_async_context(_served_at(listener, app, addresses))
            if app.state.first_key is not None:
                _say(f"API key, shown only this once: {app.state.first_key.secret}")
            yield

    app.router.lifespan_context = lifespan


@asynccontextmanager
async def _served_at(listener: socket.socket, app: FastAPI, addresses: Addresses) -> AsyncIterator[None]:
    """Serve the application also on `listener`. The ASGI server runs the lifespan and handles the process's signals."""
    config = uvicorn.Config(
        app,
        lifespan="off",
        log_config=None,
        access_log=False,
        http=BoundedProtocol,
        ws="none",
        proxy_headers=False,
        timeout_keep_alive=int(KEEP_ALIVE_SECONDS),
        server_header=False,
    )
    config.load()
    state = ServerState()

    def protocol() -> BoundedProtocol:
        return BoundedProtocol(config=config, server_state=state, app_state={}, addresses=addresses)

    server = await asyncio.get_running_loop().create_server(protocol, sock=listener)
    try:
        yield
    finally:
        server.close()
        for connection in list(state.connections):
            connection.shutdown()


def _application() -> FastAPI:
    """Return the application. On an error, print one sentence and exit, instead of a traceback during import."""
    try:
        settings = load_settings({})
        configure_logs(settings.log_level, settings.log_format)
        for note in notes_on(settings, {}):
            _say(f"tinsmith: {note}")
        for_metrics = listen_for_metrics(settings)
        app = create_app(settings)
    except TinsmithError as error:
        _say(f"tinsmith: {error}")
        sys.exit(os.EX_CONFIG)
    _begin_alone(app, for_metrics, Addresses(settings.connections_per_address, ()))
    return app


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


app = _application()
