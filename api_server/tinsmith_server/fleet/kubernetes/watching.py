"""Lists and watches. A list and a watch keep a copy of all objects of one kind, in one or several namespaces."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

from pydantic import ValidationError
from typing_extensions import override

from tinsmith_server.errors import StartupError
from tinsmith_server.fleet.kubernetes.api import (
    WATCH_SECONDS,
    ApiRefused,
    ApiUnavailable,
    HistoryGone,
    KubernetesApi,
    KubernetesError,
    Manifest,
    Resource,
)
from tinsmith_server.logs import get_logger
from tinsmith_server.settings import EVERY_NAMESPACE

log = get_logger(__name__)

FIRST_BACKOFF_SECONDS = 0.5
MAX_BACKOFF_SECONDS = 15.0
# After the time of three watches without an event or a list, the copy is too old for routing requests.
STALE_SECONDS = 3.0 * WATCH_SECONDS

T = TypeVar("T")
Key: TypeAlias = tuple[str, str]
"""An object's namespace and name."""


def key_of(manifest: Manifest) -> Key:
    return manifest["metadata"]["namespace"], manifest["metadata"]["name"]


def _version_of(manifest: Manifest) -> int:
    """Return an object's version as a number. The versions of one kind of object grow with each write."""
    return int(manifest["metadata"]["resourceVersion"])


class Watch(Generic[T]):
    """A copy of the objects of one kind in one namespace.

    The watch is level-triggered: the listener reads all `objects` after each change. A change of fields that this
    server does not read does not count as a change. The status of a busy session is written every minute, and each
    counted change wakes all held polls.
    """

    def __init__(
        self,
        api: KubernetesApi,
        resource: Resource,
        namespace: str | None,
        parse: Callable[[Manifest], T | None],
        on_change: Callable[[], None],
    ) -> None:
        """Start with an empty copy.

        `parse` raises pydantic's ValidationError for an invalid object. The error is logged, and the object is left
        out. An object for which `parse` returns None is left out, too.
        """
        self._api = api
        self._resource = resource
        self._namespace = namespace
        self._parse = parse
        self._on_change = on_change
        self._objects: dict[Key, T] = {}
        self._task: asyncio.Task[None] | None = None
        self._updated_at: float | None = None
        self._seen_version = 0
        self.failure = "not listed yet"
        self.refused = False

    @property
    def objects(self) -> Mapping[Key, T]:
        return self._objects

    @property
    def what(self) -> str:
        """The name of the watched objects, for messages."""
        where = "of any namespace" if self._namespace is None else f"of namespace {self._namespace}"
        return f"{self._resource.kind}s {where}"

    async def until_listed(self) -> None:
        """Return after the first list. Raises ApiRefused if the API does not allow the list.

        Other errors are retried.
        """
        backoff = FIRST_BACKOFF_SECONDS
        while True:
            try:
                self.start(await self._list())
                return
            except ApiRefused as error:
                self._note_failure(error)
                raise
            except KubernetesError as error:
                self._note_failure(error)
            await asyncio.sleep(backoff)
            backoff = min(2 * backoff, MAX_BACKOFF_SECONDS)

    def start(self, version: str = "") -> None:
        """Start the watch from this version.

        Without a version, list the objects first, and retry until the list succeeds.
        """
        self._task = asyncio.create_task(self._watch(version), name=f"watch {self.what}")

    async def refresh(self) -> bool:
        """Replace the copy and the watch. The old watch may have ended unnoticed.

        Returns whether the copy has changed. Raises KubernetesError.
        """
        before = dict(self._objects)
        version = await self._list()
        if self._task is not None:
            self._task.cancel()
        self.start(version)
        return self._objects != before

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    @property
    def problem(self) -> str | None:
        """The reason why the copy may be outdated, or None if the copy is up to date.

        A copy is outdated if the watch has received nothing for too long.
        """
        if self._updated_at is None:
            return None
        silent = asyncio.get_running_loop().time() - self._updated_at
        return f"the {self.what} cannot be read: {self.failure}" if silent > STALE_SECONDS else None

    def note(self, manifest: Manifest) -> None:
        """Add an object that this server has just created, unless the watch has reported the object or a later version.

        If the watch has reached a later version without reporting the object, the object was already deleted.
        """
        if key_of(manifest) not in self._objects and _version_of(manifest) > self._seen_version:
            self._put(manifest)
            self._on_change()

    async def _watch(self, version: str) -> None:
        backoff = FIRST_BACKOFF_SECONDS
        while True:
            try:
                version = await self._follow(version)
                backoff = FIRST_BACKOFF_SECONDS
                continue
            except KubernetesError as error:
                if not isinstance(error, HistoryGone):
                    self._note_failure(error)
            except Exception:
                # Without a watch, the server would send models to sessions that no longer exist.
                log.exception("watch failed")
            # Only a list shows the changes that were missed in between, above all deletions.
            version = ""
            await asyncio.sleep(backoff)
            backoff = min(2 * backoff, MAX_BACKOFF_SECONDS)

    async def _follow(self, version: str) -> str:
        """Follow one watch, and return the latest version of the objects.

        Without a version to continue from, list the objects first.
        """
        version = version or await self._list()
        async with aclosing(self._api.watch(self._resource, self._namespace, version)) as events:
            async for type, manifest in events:
                version = manifest["metadata"]["resourceVersion"]
                self._mark_current()
                self._apply(type, manifest)
        self._mark_current()
        return version

    def _apply(self, type: str, manifest: Manifest) -> None:
        self._seen_version = _version_of(manifest)
        if type == "BOOKMARK":
            return
        key = key_of(manifest)
        before = self._objects.get(key)
        if type == "DELETED":
            self._objects.pop(key, None)
        else:
            self._put(manifest)
        if self._objects.get(key) != before:
            self._on_change()

    async def _list(self) -> str:
        manifests, version = await self._api.list(self._resource, self._namespace)
        self._mark_current()
        self._seen_version = int(version)
        before = dict(self._objects)
        self._objects.clear()
        for manifest in manifests:
            self._put(manifest)
        if self._objects != before:
            self._on_change()
        return version

    def _put(self, manifest: Manifest) -> None:
        key = key_of(manifest)
        try:
            parsed = self._parse(manifest)
        except ValidationError as error:
            parsed = None
            log.warning(f"{self._resource.kind} not understood", object="/".join(key), error=str(error))
        if parsed is not None:
            self._objects[key] = parsed
        else:
            self._objects.pop(key, None)

    def _mark_current(self) -> None:
        self.refused = False
        self._updated_at = asyncio.get_running_loop().time()

    def _note_failure(self, error: KubernetesError) -> None:
        self.failure, self.refused = str(error), isinstance(error, ApiRefused)
        log.warning("not watched", what=self.what, reason=self.failure)


OPEN_SECONDS = 120.0
# This time is shorter than a poll's hold, so that a client sees the loss of a sampler within two polls.
MOST_PAUSE_SECONDS = 15.0


class View(Generic[T]):
    """The copies of the objects in several namespaces.

    If a namespace cannot be read, the read is repeated, and the other namespaces are not affected.
    """

    def __init__(
        self,
        api: KubernetesApi,
        resource: Resource,
        scope: Scope,
        parse: Callable[[Manifest], T | None],
        on_change: Callable[[], None],
        *,
        required: bool = True,
    ) -> None:
        """Prepare the watches. `required`: the server cannot work if it may list the objects in no namespace."""
        self._resource = resource
        self._required = required
        self._watches = {namespace: Watch(api, resource, namespace, parse, on_change) for namespace in scope.watched}

    async def open(self) -> None:
        """Return when each namespace was listed once.

        Raises StartupError if the API refuses all required lists, or if a list gets no answer in time.
        """
        refusals = await together(self._open(watch) for watch in self._watches.values())
        if self._required and all(refusals):
            raise StartupError(
                f"{refusals[0]}; check that the CRD of {self._resource.kind} is installed, and that this service "
                "account may list the objects"
            )

    async def close(self) -> None:
        await asyncio.gather(*(watch.close() for watch in self._watches.values()))

    @property
    def objects(self) -> Mapping[Key, T]:
        return {key: one for watch in self._watches.values() for key, one in watch.objects.items()}

    @property
    def problem(self) -> str | None:
        """The reason why a copy may be outdated.

        A namespace without access does not count as long as other namespaces can be read.
        """
        silent = [watch for watch in self.watches if watch.problem is not None]
        counted = (
            silent
            if self._required and len(silent) == len(self.watches)
            else [watch for watch in silent if not watch.refused]
        )
        return next((watch.problem for watch in counted), None)

    @property
    def watches(self) -> Sequence[Watch[T]]:
        return list(self._watches.values())

    def note(self, manifest: Manifest) -> None:
        """Add an object that this server has just created in one of the namespaces."""
        watch = self._watches.get(manifest["metadata"]["namespace"]) or self._watches[None]
        watch.note(manifest)

    async def _open(self, watch: Watch[T]) -> str | None:
        """Open one watch. Return the reason if the API refuses the list, otherwise None."""
        try:
            async with asyncio.timeout(OPEN_SECONDS):
                await watch.until_listed()
        except TimeoutError:
            raise StartupError(f"the {watch.what} cannot be read: {watch.failure} (for {OPEN_SECONDS:g} s)") from None
        except ApiRefused as error:
            watch.start()
            return f"the {watch.what} cannot be read: {error}"
        return None


class SharedRefresh:
    """Refreshes that callers share: one recent refresh serves all callers.

    After a refresh without changes, the pause before the next refresh is doubled. The pauses are necessary because each
    unknown sampler ID causes a list of the whole fleet, and any client can invent IDs.
    """

    def __init__(self, refresh: Callable[[], Awaitable[bool]], age_seconds: float, timeout_seconds: float) -> None:
        """Prepare the refreshes.

        `refresh` returns whether it found changes. A shared result may be up to `age_seconds` old. A refresh takes at
        most `timeout_seconds`.
        """
        self._refresh = refresh
        self._age_seconds = age_seconds
        self._timeout_seconds = timeout_seconds
        self._pause_seconds = age_seconds
        self._began_at = float("-inf")
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    async def recent(self) -> None:
        """Wait for a refresh that began recently.

        Raises the error of the refresh, TimeoutError, or ApiUnavailable after `close`.
        """
        clock = asyncio.get_running_loop().time
        oldest = clock() - self._age_seconds
        while self._task is None or self._began_at < oldest:
            if self._closed:
                raise ApiUnavailable("this server is stopping")
            if self._task is not None and not self._task.done():
                await asyncio.wait({self._task})
            elif (pause_seconds := self._began_at + self._pause_seconds - clock()) > 0:
                await asyncio.sleep(pause_seconds)
            else:
                self._task = self._begin()
        # A caller that gives up must not cancel the refresh for the other callers.
        await asyncio.shield(self._task)

    async def close(self) -> None:
        self._closed = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _begin(self) -> asyncio.Task[None]:
        now = asyncio.get_running_loop().time()
        if now - self._began_at > MOST_PAUSE_SECONDS:
            self._pause_seconds = self._age_seconds
        self._began_at = now
        task = asyncio.create_task(self._bounded(), name="refresh from the Kubernetes API")
        # All callers may have given up.
        task.add_done_callback(lambda ended: None if ended.cancelled() else ended.exception())
        return task

    async def _bounded(self) -> None:
        async with asyncio.timeout(self._timeout_seconds):
            is_news = await self._refresh()
        self._pause_seconds = self._age_seconds if is_news else min(2 * self._pause_seconds, MOST_PAUSE_SECONDS)


@dataclass(frozen=True, slots=True)
class Scope:
    """The namespaces that this server reads. If `namespaces` is None, the server reads the whole cluster.

    Sessions are created in `home`.
    """

    namespaces: tuple[str, ...] | None
    home: str | None

    def covers(self, namespace: str) -> bool:
        return self.namespaces is None or namespace in self.namespaces

    @property
    def watched(self) -> tuple[str | None, ...]:
        """The namespaces to list and to watch. None stands for the whole cluster."""
        return (None,) if self.namespaces is None else self.namespaces

    @override
    def __str__(self) -> str:
        if self.namespaces is None:
            return "any namespace"
        if len(self.namespaces) == 1:
            return f"namespace {self.namespaces[0]}"
        return f"the namespaces {', '.join(self.namespaces)}"


def scope_of(chosen: Sequence[str], own: str | None) -> Scope:
    """Return the scope of the chosen namespaces.

    If no namespace is chosen, return the scope of `own`, the server's namespace. Raises StartupError if no namespace is
    chosen and the server has no own namespace.
    """
    if tuple(chosen) == (EVERY_NAMESPACE,):
        return Scope(None, own)
    namespaces = tuple(chosen) or ((own,) if own is not None else ())
    if not namespaces:
        raise StartupError(
            "this server does not run in a Kubernetes pod: set fleet_namespaces to the namespaces of its fleet"
        )
    return Scope(namespaces, own if own in namespaces else namespaces[0])


async def together(beginnings: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return the results of all calls.

    Raises the first failure when all calls have ended. After a failure, `asyncio.gather` would leave the other calls
    running.
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(beginning) for beginning in beginnings]
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]
