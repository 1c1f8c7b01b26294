"""The time since a client last used a worker or sampler, from which the operator knows that the process is idle."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
from typing_extensions import override

from tinsmith_trainer.worker.peers import Context, Handler, Serve, wrapped

SERVICE = "/tinsmith.rpc.v1.Worker"
NOT_FOR_A_CLIENT = frozenset(
    f"{SERVICE}/{call}"
    for call in ("Describe", "Activate", "Events", "AwaitSamples", "Prepare", "TakeUsage", "Timeline", "Snapshot")
)
"""The calls that servers and the operator make although no client uses the process.

A call of AwaitSamples waits for samples, and unfinished samples count as work. Prepare announces weights that may
never be sampled from.
"""


class ClientActivity:
    """The calls for clients: how many run now, and when the last one ended. Used on one event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._running = 0
        self._last_use_at = clock()

    @contextmanager
    def use(self) -> Iterator[None]:
        """Count one call from now until the end of the block."""
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1
            self._last_use_at = self._clock()

    def idle_seconds(self, *, works: bool) -> float:
        """Return the seconds since the last use, or 0 if a call runs.

        `works` says that work runs or waits. The end of work counts as a use.
        """
        if works or self._running:
            self._last_use_at = self._clock()
            return 0.0
        return self._clock() - self._last_use_at


class CountCalls(grpc.aio.ServerInterceptor):
    """An interceptor that counts the calls for clients."""

    def __init__(self, activity: ClientActivity) -> None:
        self._activity = activity

    @override
    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method in NOT_FOR_A_CLIENT:
            return handler

        async def count(serve: Serve, request: Any, context: Context) -> Any:
            with self._activity.use():
                return await serve(request, context)

        return wrapped(handler, count)
