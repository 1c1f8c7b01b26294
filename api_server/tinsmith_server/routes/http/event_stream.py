"""Responses of server-sent events, and work that ends when its client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from fastapi import Response
from starlette.requests import ClientDisconnect
from starlette.types import Message as AsgiMessage
from starlette.types import Receive, Scope, Send
from typing_extensions import override

T = TypeVar("T")


class EventStream(Response):
    """A response of server-sent events. `on_end` is always called, even if the client disconnects."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], on_end: Callable[[], Awaitable[None]]) -> None:
        super().__init__(headers={"cache-control": "no-store", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._on_end = on_end

    @override
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._send(send))
        finally:
            await self._on_end()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for event in self._events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def while_connected(receive: Callable[[], Awaitable[AsgiMessage]], work: Coroutine[Any, Any, T]) -> T:
    """Return the result of the work.

    If the client disconnects, cancel the work, wait for the end of the work, and raise ClientDisconnect.
    """

    async def until_disconnect() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task, disconnect = asyncio.create_task(work), asyncio.create_task(until_disconnect())
    try:
        await asyncio.wait({task, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        disconnect.cancel()
        await asyncio.wait({task, disconnect})
