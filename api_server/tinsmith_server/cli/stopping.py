"""uvicorn's server with two words of ours: one when it is ready, one before it stops."""

from __future__ import annotations

import socket
from collections.abc import Callable

import uvicorn
from fastapi import FastAPI
from typing_extensions import override

from tinsmith_server.app import release_polls


class StoppingServer(uvicorn.Server):
    """Says when it answers, and lets held polls go before it waits for open connections."""

    def __init__(self, config: uvicorn.Config, announce: Callable[[], None]) -> None:
        super().__init__(config)
        self._announce = announce

    @override
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().startup(sockets)
        except SystemExit:
            # uvicorn has logged the cause and thrown it away; the application has kept it.
            raise _application(self).state.startup_error from None
        if self.started:
            self._announce()

    @override
    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        release_polls(_application(self))
        await super().shutdown(sockets)


def _application(server: uvicorn.Server) -> FastAPI:
    assert isinstance(server.config.app, FastAPI)
    return server.config.app
