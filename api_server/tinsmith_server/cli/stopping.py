"""uvicorn's server with words of ours: when it is ready, before it stops, and when it never was."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from types import FrameType

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
    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if not self.started:
            # uvicorn would wait for the start, which may wait for a database or a cluster. No request was taken.
            os._exit(0)
        super().handle_exit(sig, frame)

    @override
    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        release_polls(_application(self))
        await super().shutdown(sockets)


def _application(server: uvicorn.Server) -> FastAPI:
    assert isinstance(server.config.app, FastAPI)
    return server.config.app
