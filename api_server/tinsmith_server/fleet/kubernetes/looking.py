"""A look that many may want at once, and the API should not have to bear more than now and then."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from tinsmith_server.fleet.kubernetes.errors import ApiUnavailable


class SharedLook:
    """Whoever wants one gets a look that began not long ago: another's, or one of its own."""

    def __init__(self, look: Callable[[], Awaitable[None]], age_seconds: float, timeout_seconds: float) -> None:
        """A look may be `age_seconds` old, and takes `timeout_seconds` at most."""
        self._look = look
        self._age_seconds = age_seconds
        self._timeout_seconds = timeout_seconds
        self._began_at = float("-inf")
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    async def recent(self) -> None:
        """Returns when one has succeeded; raises what it raised, TimeoutError, or ApiUnavailable once it is closed."""
        if self._closed:
            raise ApiUnavailable("this server is stopping")
        oldest = asyncio.get_running_loop().time() - self._age_seconds
        while self._task is None or self._began_at < oldest:
            if self._task is None or self._task.done():
                self._task = self._begin()
            else:
                await asyncio.wait({self._task})
        # One who gives up must not take it from the others.
        await asyncio.shield(self._task)

    async def close(self) -> None:
        self._closed = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _begin(self) -> asyncio.Task[None]:
        self._began_at = asyncio.get_running_loop().time()
        task = asyncio.create_task(self._bounded(), name="a look at the Kubernetes API")
        # All who waited may have given up.
        task.add_done_callback(lambda ended: None if ended.cancelled() else ended.exception())
        return task

    async def _bounded(self) -> None:
        async with asyncio.timeout(self._timeout_seconds):
            await self._look()
