"""The watch on RayClusters. The kind RayCluster is optional.

The watch starts when a session needs a RayCluster and KubeRay is installed.

Before the start, the watch sends no request. Installations without sessions of several nodes need neither KubeRay nor
rights on RayClusters.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from tinsmith_operator.api.base import Manifest
from tinsmith_operator.errors import ClusterError, NotFound, OperatorError, Refused
from tinsmith_operator.installation import Scope
from tinsmith_operator.kube.cache import Cache
from tinsmith_operator.kube.client import Cluster
from tinsmith_operator.kube.resources import RAY_CLUSTERS
from tinsmith_operator.kube.watch_stream import ListAnswered
from tinsmith_operator.logs import get_logger
from tinsmith_operator.runtime.informer import RETRY_SECONDS, Informer, words_for

# A new kind can be listed slightly before it appears in the API server's discovery, which Kopf uses.
LISTED_WITHIN_SECONDS = 10.0
UNKNOWN_KIND = "The cluster has no RayClusters: KubeRay is not installed."

log = get_logger(__name__)


class Watching(Protocol):
    async def run(self) -> None:
        """Watch until `stop`. Raises OperatorError if the watch fails."""

    async def stop(self) -> None:
        """Stop the watch, and return when the watch has stopped."""


class RayClusterInformer:
    """The state of the watch on RayClusters.

    - `changed`: called when a namespace may have become known or forbidden.
    - `open_watch`: opens a watch on RayClusters only. The argument of `open_watch` is called for each page of the
      watch's lists.
    """

    def __init__(
        self,
        cluster: Cluster,
        cache: Cache,
        scope: Scope,
        *,
        changed: Callable[[], None],
        open_watch: Callable[[ListAnswered], Watching],
        look_again_seconds: float,
    ) -> None:
        self._cluster = cluster
        self._cache = cache
        self._scope = scope
        self._changed = changed
        self._open_watch = open_watch
        self._look_again_seconds = look_again_seconds
        self._enabled = asyncio.Event()
        self._listed = asyncio.Event()
        self._informer = self._new_informer()
        self._problem: str | None = None

    def enable(self) -> None:
        """Start to look for RayClusters."""
        self._enabled.set()

    def knows(self, namespace: str) -> bool:
        """Return whether the cache has all RayClusters of this namespace."""
        return self._informer.knows(namespace)

    def problem(self, namespace: str) -> str | None:
        """Return a sentence that says why this namespace can have no RayClusters, or None if no reason is known."""
        if self._problem is not None:
            return self._problem
        part = self._scope.part_of(namespace)
        return _forbidden(part) if self._informer.is_refused(part) else None

    async def run(self) -> None:
        """Watch until cancelled. If the watch ends, for example because KubeRay is missing, look for the kind again."""
        await self._enabled.wait()
        while True:
            self._set_problem(await self._look())
            if self._problem is None:
                await self._watch()
            await asyncio.sleep(self._look_again_seconds)

    async def _look(self) -> str | None:
        """Return why a watch cannot start.

        Without the check before the start, the watch of a missing kind would wait and raise no error.
        """
        while True:
            try:
                return await self._look_once()
            except ClusterError as error:
                log.warning("waiting for the API server", error=str(error))
                await asyncio.sleep(RETRY_SECONDS)

    async def _look_once(self) -> str | None:
        refused = None
        for part in self._scope.parts:
            try:
                await self._cluster.try_list(RAY_CLUSTERS, part)
            except NotFound:
                return UNKNOWN_KIND
            except Refused:
                refused = _forbidden(part)
            else:
                return None
        return refused

    async def _watch(self) -> None:
        """Watch until the watch ends.

        If a watch gets no list for some time, end the watch, because it looked for the kind too early.
        """
        self._informer, self._listed = self._new_informer(), asyncio.Event()
        watch = self._open_watch(self._on_page)
        running = asyncio.create_task(watch.run(), name="watch RayClusters")
        try:
            async with asyncio.timeout(LISTED_WITHIN_SECONDS):
                await self._listed.wait()
            await running
        except (TimeoutError, OperatorError) as error:
            log.warning("RayClusters are not watched", error=repr(error))
        finally:
            await watch.stop()
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            self._informer = self._new_informer()

    def _on_page(
        self, namespace: str | None, plural: str, code: str, answer: Manifest | None, is_first: bool = True
    ) -> None:
        self._listed.set()
        self._informer.on_list(namespace, plural, code, answer, is_first)
        if code == "403":
            self._changed()

    def _set_problem(self, problem: str | None) -> None:
        if problem != self._problem:
            log.info("RayClusters", problem=problem)
            self._problem = problem
            self._changed()

    def _new_informer(self) -> Informer:
        return Informer(self._cluster, self._cache, self._scope, lambda _part: self._changed(), (RAY_CLUSTERS,))


def _forbidden(part: str | None) -> str:
    return f"The operator may not list rayclusters.ray.io in {words_for(part)}: its Role lacks that right."
