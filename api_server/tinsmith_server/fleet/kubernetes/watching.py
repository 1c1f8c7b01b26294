"""Keeps this server's picture of one kind of objects: one list, then what the API says of changes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import aclosing
from typing import Generic, TypeAlias, TypeVar

from pydantic import ValidationError

from tinsmith_server.fleet.kubernetes.api import WATCH_SECONDS, KubernetesApi, Manifest, Resource
from tinsmith_server.fleet.kubernetes.errors import ApiRefused, HistoryGone, KubernetesError
from tinsmith_server.logs import get_logger

log = get_logger(__name__)

FIRST_BACKOFF_SECONDS = 0.5
MAX_BACKOFF_SECONDS = 15.0
# After three watches' time without a word the picture is too old to send anybody here.
STALE_SECONDS = 3.0 * WATCH_SECONDS

T = TypeVar("T")
Key: TypeAlias = tuple[str, str]
"""Namespace and name."""


def key_of(manifest: Manifest) -> Key:
    return manifest["metadata"]["namespace"], manifest["metadata"]["name"]


def _version_of(manifest: Manifest) -> int:
    """Versions of one kind grow with each write."""
    return int(manifest["metadata"]["resourceVersion"])


class Watch(Generic[T]):
    """Level-triggered: a listener looks at `objects`, the whole picture, after each change.

    A write to a field that this server does not read is no change: the status of a busy session is written once a
    minute, and each change wakes all held polls.
    """

    def __init__(
        self,
        api: KubernetesApi,
        resource: Resource,
        namespace: str | None,
        parse: Callable[[Manifest], T],
        on_change: Callable[[], None],
    ) -> None:
        """`parse` raises pydantic's ValidationError for what it does not understand: that is left out, and logged."""
        self._api = api
        self._resource = resource
        self._namespace = namespace
        self._parse = parse
        self._on_change = on_change
        self._objects: dict[Key, T] = {}
        self._task: asyncio.Task[None] | None = None
        self._heard_at: float | None = None
        self._seen_version = 0
        self.failure = "they have not been listed yet"
        self.refused = False

    @property
    def objects(self) -> Mapping[Key, T]:
        return self._objects

    @property
    def what(self) -> str:
        """What is watched, for the one who reads why it is not."""
        where = "of any namespace" if self._namespace is None else f"of namespace {self._namespace}"
        return f"{self._resource.kind}s {where}"

    async def until_listed(self) -> None:
        """Raises ApiRefused when the API does not allow it; anything less is tried again."""
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
        """Follows from this version on; without one, from a list, which is asked for until it is granted."""
        self._task = asyncio.create_task(self._watch(version), name=f"watch {self.what}")

    async def refresh(self) -> bool:
        """Replaces the picture and the watch, which may have ended unnoticed. Raises KubernetesError.

        Returns whether the picture is another one.
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
        """Set once a picture that was there may be wrong, since nothing has been heard for so long."""
        if self._heard_at is None:
            return None
        silent = asyncio.get_running_loop().time() - self._heard_at
        return f"the {self.what} cannot be read: {self.failure}" if silent > STALE_SECONDS else None

    def note(self, manifest: Manifest) -> None:
        """Add an object that this server has just made, unless the watch has told of it or of a later version.

        An object that the watch lacks although it has seen a later version was deleted meanwhile.
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
                # A server that no longer watches would send models to sessions that are gone.
                log.exception("watch failed")
            # What was missed meanwhile, deletions above all, only a list can tell.
            version = ""
            await asyncio.sleep(backoff)
            backoff = min(2 * backoff, MAX_BACKOFF_SECONDS)

    async def _follow(self, version: str) -> str:
        """One watch, with a list before it where there is no version to go on from; returns where it ended."""
        version = version or await self._list()
        async with aclosing(self._api.watch(self._resource, self._namespace, version)) as events:
            async for type, manifest in events:
                version = manifest["metadata"]["resourceVersion"]
                self._hear()
                self._apply(type, manifest)
        self._hear()
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
        self._hear()
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
            self._objects[key] = self._parse(manifest)
        except ValidationError as error:
            self._objects.pop(key, None)
            log.warning(f"{self._resource.kind} not understood", object="/".join(key), error=str(error))

    def _hear(self) -> None:
        self.refused = False
        self._heard_at = asyncio.get_running_loop().time()

    def _note_failure(self, error: KubernetesError) -> None:
        self.failure, self.refused = str(error), isinstance(error, ApiRefused)
        log.warning("not watched", what=self.what, reason=self.failure)
