"""The server for whoever starts ASGI applications by a command of their own: `uvicorn tinsmith_server.asgi:app`.

Settings come from the environment alone. `tinsmith serve` does more: it bounds connections, and lets held polls go when
it stops. Each process is a whole server, so several workers of uvicorn need what several servers need.
"""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

from tinsmith_server.app import create_app
from tinsmith_server.configuration import load_settings, notes_on
from tinsmith_server.errors import TinsmithError
from tinsmith_server.logs import configure_logs


def _announce_first_key(app: FastAPI) -> None:
    """An installation without any key makes one, which is shown once; here by nobody else."""
    begin = app.router.lifespan_context

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with begin(app):
            if app.state.first_key is not None:
                _say(f"API key, shown only this once: {app.state.first_key.secret}")
            yield

    app.router.lifespan_context = lifespan


def _application() -> FastAPI:
    """One sentence, where the server cannot start like this, and no traceback of an import."""
    try:
        settings = load_settings({})
        configure_logs(settings.log_level, settings.log_format)
        for note in notes_on(settings, {}):
            _say(f"tinsmith: {note}")
        app = create_app(settings)
    except TinsmithError as error:
        _say(f"tinsmith: {error}")
        sys.exit(os.EX_CONFIG)
    _announce_first_key(app)
    return app


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


app = _application()
