"""The requests that wake sessions and pools which the operator has suspended because no client used them.

Autoscalers of pools without replicas react to the same requests.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime
from typing import Any, Protocol

from tinsmith_server.fleet.kubernetes.api import KubernetesError, Resource
from tinsmith_server.fleet.kubernetes.watching import Key
from tinsmith_server.logs import get_logger

log = get_logger(__name__)

RETRY_SECONDS = 1.0
DEMAND_SECONDS = 15.0
"""The time between two notes of the demand for one pool. An autoscaler forgets a note after a minute."""


class Sleeper(Protocol):
    """A session or pool that may be suspended. `suspended_at` is None while it is awake."""

    @property
    def key(self) -> Key: ...
    @property
    def suspended_at(self) -> datetime | None: ...


Want = Callable[[Resource, str, str, datetime], Coroutine[Any, Any, None]]


class Waker:
    """The wake requests of one server. Each suspension is ended by one request, however many clients wait.

    A request has effect even if another server has made the same request, because the operator carries out each new
    value once, and a session that is awake only begins its idle time anew.
    """

    def __init__(self, want: Want) -> None:
        self._want = want
        self._wanted: dict[tuple[str, Key], datetime] = {}
        self._demanded_at: dict[Key, float] = {}
        self._requests: set[asyncio.Task[None]] = set()

    def wake(self, resource: Resource, sleeper: Sleeper) -> None:
        """Request the end of the suspension, unless this server has already done so."""
        suspended_at, place = sleeper.suspended_at, (resource.kind, sleeper.key)
        if suspended_at is None or self._wanted.get(place) == suspended_at:
            return
        self._wanted[place] = suspended_at
        self._begin(resource, sleeper.key, place)

    def note_use(self, resource: Resource, key: Key) -> None:
        """Begin the idle time of a session anew, whether or not it is suspended."""
        self._begin(resource, key, None)

    def note_demand(self, resource: Resource, key: Key) -> None:
        """Write that a client needs a pool that takes no samples, unless this server has just done so."""
        now = asyncio.get_running_loop().time()
        if now - self._demanded_at.get(key, -DEMAND_SECONDS) >= DEMAND_SECONDS:
            self._demanded_at[key] = now
            self._begin(resource, key, None)

    async def close(self) -> None:
        for request in self._requests:
            request.cancel()
        await asyncio.gather(*self._requests, return_exceptions=True)

    def _begin(self, resource: Resource, key: Key, place: tuple[str, Key] | None) -> None:
        request = asyncio.create_task(self._request(resource, key, place), context=contextvars.Context())
        self._requests.add(request)
        request.add_done_callback(self._requests.discard)

    async def _request(self, resource: Resource, key: Key, place: tuple[str, Key] | None) -> None:
        namespace, name = key
        try:
            await self._want(resource, namespace, name, datetime.now(UTC))
        except KubernetesError as error:
            log.warning("wake request failed", kind=resource.kind, namespace=namespace, name=name, reason=str(error))
            await asyncio.sleep(RETRY_SECONDS)
            # The next request of a client tries again.
            self._demanded_at.pop(key, None)
            if place is not None:
                self._wanted.pop(place, None)
            return
        log.info("woken" if place else "use noted", kind=resource.kind, namespace=namespace, name=name)
