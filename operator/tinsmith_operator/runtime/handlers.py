"""The watches, which Kopf opens, lists and opens again.

Kopf logs in, keeps each watch open, and writes to no object. The answers of the API server report their objects to the
event loop of the operator before Kopf reads them (`kube/watch_stream.py`).

Kopf runs in a thread with its own event loop. The separate event loop is necessary, because at its end Kopf waits for
all foreign tasks in its event loop and cancels them.
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
from tinsmith_operator.kube.connection import Observe, Turn, WatchSession, open_watch_session
from tinsmith_operator.kube.resources import WATCHED, Resource
from tinsmith_operator.kube.watch_stream import ListAnswered

Deliver = Callable[[Resource, str | None, Manifest], None]
"""A function that takes an event: the resource, the type of the event, and the object."""

# Kopf removes its finalizer from objects. No object has this name, whereas the default name would match the finalizer
# of any other operator that is built on Kopf.
UNUSED_FINALIZER = "tinsmith.dev/unused"
LONGEST_BACKOFF_SECONDS = 30.0
RELOGIN_PAUSE_SECONDS = 5.0
# The pause before a list, after the API server has ended a watch. The API server may end every new watch, too.
RECONNECT_SECONDS = 1.0
STOP_SECONDS = 5.0


class EndlessBackoff:
    """An endless sequence of delays between retries.

    With a finite list, the operator would end if the API server were down for an hour.
    """

    def __iter__(self) -> Iterator[float]:
        seconds = 1.0
        while True:
            yield seconds
            seconds = min(seconds * 2, LONGEST_BACKOFF_SECONDS)


class Watch:
    """A watch on these kinds in a scope. The watch runs from `run` to `stop`.

    The callbacks are called in the event loop that called `run`.

    `on_list` is called for each page of the list that starts a watch, because no event reports objects that vanished
    before this list. If the operator may not list in a namespace, the watch tries again repeatedly. `turn` is awaited
    before each page.
    """

    def __init__(
        self,
        scope: Scope,
        deliver: Deliver,
        on_list: ListAnswered,
        observe: Observe,
        turn: Turn,
        resources: Sequence[Resource],
    ) -> None:
        self._turn = turn
        self._scope = scope
        self._resources = resources
        self._by_plural = {resource.plural: resource for resource in resources}
        self._deliver = deliver
        self._on_list = on_list
        self._observe = observe
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._home: asyncio.AbstractEventLoop | None = None
        self._ended: asyncio.Future[None] | None = None
        self._logins = 0
        self._sessions: list[WatchSession] = []

    async def run(self) -> None:
        """Watch until `stop`. Raises OperatorError if the watch fails. Cancelling `run` does not stop the watch."""
        self._home = asyncio.get_running_loop()
        self._ended = self._home.create_future()
        self._thread.start()
        try:
            await asyncio.shield(self._ended)
        except Exception as error:
            raise OperatorError(f"The watch of the cluster failed: {error!r}. Restart the operator.") from error

    async def stop(self) -> None:
        """Stop the thread and wait until the thread ends.

        The wait is limited, because the process can end even if the thread does not.
        """
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
        self._call_in_loop(self._end, error)

    async def _watch(self) -> None:
        """Run `kopf.operator` in two steps.

        After an error, Kopf may wait without end for its own tasks. While Kopf waits, the process would seem healthy,
        but would not watch anything. So when one of Kopf's tasks ends, this function reports the end and stops the
        other tasks.
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
        self._call_in_loop(self._end, next((part.exception() for part in ended if part.exception()), None))
        try:
            await kopf.run_tasks(parts, ignored=before)
        finally:
            await self._close_sessions()

    async def _close_sessions(self) -> None:
        """Close all sessions. Kopf does not close a session if Kopf is stopped while it opens the session."""
        for session in self._sessions:
            await session.http.close()

    def _registry(self) -> kopf.OperatorRegistry:
        registry = kopf.OperatorRegistry()
        kopf.on.login(registry=registry, id="login")(self._login)
        for resource in self._resources:
            # Kopf watches only kinds that have a handler.
            kopf.on.event(resource.group, resource.version, resource.plural, registry=registry, id="none")(_do_nothing)
        return registry

    async def _login(self, **_: Any) -> kopf.AiohttpSession:
        if self._logins:
            # Limit the rate: refused logins must not become a flood of requests.
            await asyncio.sleep(RELOGIN_PAUSE_SECONDS)
        self._logins += 1
        session = await open_watch_session(
            self._observe, lambda *page: self._call_in_loop(self._on_list, *page), self._take, self._take_turn
        )
        self._sessions = [*(each for each in self._sessions if not each.http.closed), session]
        return kopf.AiohttpSession(server=session.server, aiohttp_session=session.http, expiration=session.expires_at)

    def _take(self, plural: str, event_type: str, manifest: Manifest) -> None:
        self._call_in_loop(self._deliver, self._by_plural[plural], event_type, manifest)

    async def _take_turn(self) -> None:
        """Wait until the operator's rate limit allows the next request.

        The rate limit belongs to the event loop that called `run`.
        """
        assert self._home is not None
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._turn(), self._home))

    def _call_in_loop(self, callback: Callable[..., None], *arguments: Any) -> None:
        """Call a callback in the operator's event loop.

        If the operator has ended without waiting for this thread, do nothing.
        """
        assert self._home is not None
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            self._home.call_soon_threadsafe(callback, *arguments)

    def _end(self, error: BaseException | None) -> None:
        if self._ended is None or self._ended.done():
            return
        if error is None:
            self._ended.set_result(None)
        else:
            self._ended.set_exception(error)


async def _do_nothing(**_: Any) -> None:
    """Do nothing, because Kopf gets no events. The responses report them (`kube/watch_stream.py`)."""


def watch_settings(resources: Sequence[Resource] = WATCHED) -> kopf.OperatorSettings:
    """Return Kopf settings without writes, without a port, and with requests only in the watched namespaces."""
    settings = kopf.OperatorSettings()
    settings.scanning.disabled = True
    settings.posting.enabled = False
    settings.persistence.finalizer = UNUSED_FINALIZER
    settings.process.ultimate_exiting_timeout = None
    settings.networking.error_backoffs = EndlessBackoff()
    settings.networking.request_timeout = 60.0
    settings.watching.reconnect_backoff = RECONNECT_SECONDS
    # Each kind is listed completely, in pages, so that vanished objects are noticed.
    settings.watching.initial_streaming = False
    settings.watching.chunk_size = PAGE_ITEMS
    for resource in resources:
        if resource.label_selector is not None:
            selector = (resource.group, resource.version, resource.plural)
            settings.watching.label_selectors[selector] = resource.label_selector
    return settings
