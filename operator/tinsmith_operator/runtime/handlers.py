"""The doors: Kopf watches the cluster and hands every event on; nothing is decided here.

Kopf gives watching and reconnecting, and nothing else: only `on.event` handlers are registered, so it writes to no
object. It runs in a thread with an event loop of its own, because at its end it waits for, and then cancels, every task
of its loop that it did not know when it began.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import kopf

from tinsmith_operator.api.base import Manifest
from tinsmith_operator.errors import OperatorError
from tinsmith_operator.installation import Scope
from tinsmith_operator.kube.client import PAGE_ITEMS
from tinsmith_operator.kube.connection import Heard, Observe, Turn, WatchSession, open_watch_session
from tinsmith_operator.kube.resources import WATCHED, Resource

Deliver = Callable[[Resource, str | None, Manifest], None]
"""Takes an event: its kind of resource, its type (None in the first list), and the object."""

# Kopf removes its finalizer from objects that carry it. With a name that no object has, it never finds one; with
# its default it would take away the finalizer of another operator that is built on Kopf.
UNUSED_FINALIZER = "tinsmith.dev/unused"
LONGEST_BACKOFF_SECONDS = 30.0
RELOGIN_PAUSE_SECONDS = 5.0
# Before a list, after a watch that the API server broke off: it may do so each time.
RECONNECT_SECONDS = 1.0
STOP_SECONDS = 5.0


class EndlessBackoff:
    """An API server that is away for an hour must not end the operator, as a finite list of delays would."""

    def __iter__(self) -> Iterator[float]:
        seconds = 1.0
        while True:
            yield seconds
            seconds = min(seconds * 2, LONGEST_BACKOFF_SECONDS)


class Watch:
    """Watches these kinds in a scope from `run` to `stop`. Its callbacks run in the event loop that called `run`.

    heard: each page of the list with which the watch of a kind begins anew: what vanished before it is told by no
    event. In a namespace where that is forbidden it is tried again for ever, beside the others.
    turn: what each page waits for.
    """

    def __init__(
        self,
        scope: Scope,
        deliver: Deliver,
        heard: Heard,
        observe: Observe,
        turn: Turn,
        resources: Sequence[Resource],
    ) -> None:
        self._turn = turn
        self._scope = scope
        self._resources = resources
        self._deliver = deliver
        self._heard = heard
        self._observe = observe
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._home: asyncio.AbstractEventLoop | None = None
        self._ended: asyncio.Future[None] | None = None
        self._logins = 0
        self._sessions: list[WatchSession] = []

    async def run(self) -> None:
        """Until `stop`. Raises OperatorError when it cannot go on. Cancelling it leaves the watch running."""
        self._home = asyncio.get_running_loop()
        self._ended = self._home.create_future()
        self._thread.start()
        try:
            await asyncio.shield(self._ended)
        except Exception as error:
            raise OperatorError(f"The watch of the cluster cannot go on: {error!r}. Start anew.") from error

    async def stop(self) -> None:
        """Returns when the thread has come to its end, or takes too long: the process can end without it."""
        self._stop.set()
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join, STOP_SECONDS)

    @property
    def has_ended(self) -> bool:
        return self._ended is not None and self._ended.done()

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            asyncio.run(self._watch())
        except BaseException as caught:
            error = caught
        self._tell(self._end, error)

    async def _watch(self) -> None:
        """`kopf.operator` in two steps. After an error Kopf may wait for ever for its own parts to end, and a process
        that watches nothing would seem alive: so the first part that ends is told before the rest is asked to.
        """
        before = asyncio.all_tasks()
        parts = await kopf.spawn_tasks(
            registry=self._registry(),
            settings=watch_settings(self._resources),
            namespaces=self._scope.namespaces or (),
            clusterwide=self._scope.is_cluster,
            standalone=True,
            stop_flag=self._stop,
        )
        ended, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
        self._tell(self._end, next((part.exception() for part in ended if part.exception()), None))
        try:
            await kopf.run_tasks(parts, ignored=before)
        finally:
            await self._close_sessions()

    async def _close_sessions(self) -> None:
        """Kopf closes those that it took, and not one that a stop comes in the middle of taking."""
        for session in self._sessions:
            await session.http.close()

    def _registry(self) -> kopf.OperatorRegistry:
        registry = kopf.OperatorRegistry()
        kopf.on.login(registry=registry, id="login")(self._login)
        for resource in self._resources:
            kopf.on.event(
                resource.group, resource.version, resource.plural, registry=registry, id="deliver", param=resource
            )(self._take)
        return registry

    async def _login(self, **_: Any) -> kopf.AiohttpSession:
        if self._logins:
            # A login that is refused at once must not become a storm.
            await asyncio.sleep(RELOGIN_PAUSE_SECONDS)
        self._logins += 1
        session = await open_watch_session(self._observe, lambda *page: self._tell(self._heard, *page), self._take_turn)
        self._sessions = [*(each for each in self._sessions if not each.http.closed), session]
        return kopf.AiohttpSession(server=session.server, aiohttp_session=session.http, expiration=session.expires_at)

    async def _take(self, *, event: kopf.RawEvent, param: Any = None, **_: Any) -> None:
        self._tell(self._deliver, param, event["type"], dict(event["object"]))

    async def _take_turn(self) -> None:
        """Lists wait in the same queue as what the operator asks itself, which is in the loop that called `run`."""
        assert self._home is not None
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._turn(), self._home))

    def _tell(self, callback: Callable[..., None], *arguments: Any) -> None:
        """Nobody listens any more where the operator ended without waiting for this thread."""
        assert self._home is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._home.call_soon_threadsafe(callback, *arguments)

    def _end(self, error: BaseException | None) -> None:
        if self._ended is None or self._ended.done():
            return
        if error is None:
            self._ended.set_result(None)
        else:
            self._ended.set_exception(error)


def watch_settings(resources: Sequence[Resource] = WATCHED) -> kopf.OperatorSettings:
    """Kopf with everything off that would write, listen, or need rights beyond the namespaces that it was told."""
    settings = kopf.OperatorSettings()
    settings.scanning.disabled = True
    settings.posting.enabled = False
    settings.persistence.finalizer = UNUSED_FINALIZER
    settings.process.ultimate_exiting_timeout = None
    settings.networking.error_backoffs = EndlessBackoff()
    settings.networking.request_timeout = 60.0
    settings.watching.reconnect_backoff = RECONNECT_SECONDS
    # Each kind is listed whole, in pages: what they lack is gone.
    settings.watching.initial_streaming = False
    settings.watching.chunk_size = PAGE_ITEMS
    for resource in resources:
        if resource.label_selector is not None:
            selector = (resource.group, resource.version, resource.plural)
            settings.watching.label_selectors[selector] = resource.label_selector
    return settings
