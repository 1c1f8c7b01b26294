"""One kind of objects in every namespace of a fleet, as one picture."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, TypeVar

from tinsmith_server.errors import StartupError
from tinsmith_server.fleet.kubernetes.api import KubernetesApi, Manifest, Resource
from tinsmith_server.fleet.kubernetes.errors import ApiRefused
from tinsmith_server.fleet.kubernetes.opening import together
from tinsmith_server.fleet.kubernetes.scope import Scope
from tinsmith_server.fleet.kubernetes.watching import Key, Watch

T = TypeVar("T")

OPEN_SECONDS = 120.0


class View(Generic[T]):
    """A namespace that the API keeps from this server is asked for again and again, and does not hold up the others."""

    def __init__(
        self,
        api: KubernetesApi,
        resource: Resource,
        scope: Scope,
        parse: Callable[[Manifest], T],
        on_change: Callable[[], None],
    ) -> None:
        self._resource = resource
        self._watches = {namespace: Watch(api, resource, namespace, parse, on_change) for namespace in scope.watched}

    async def open(self) -> None:
        """Returns with the first lists. Raises StartupError when all are refused, or one stays silent for too long."""
        refusals = await together(self._open(watch) for watch in self._watches.values())
        if all(refusals):
            raise StartupError(
                f"{refusals[0]}; is the definition of {self._resource.kind} installed, and may this service account "
                "list them?"
            )

    async def close(self) -> None:
        await asyncio.gather(*(watch.close() for watch in self._watches.values()))

    @property
    def objects(self) -> Mapping[Key, T]:
        return {key: one for watch in self._watches.values() for key, one in watch.objects.items()}

    @property
    def problem(self) -> str | None:
        """A namespace whose administrator has taken the right away is none, while there are others."""
        silent = [watch for watch in self.watches if watch.problem is not None]
        counted = silent if len(silent) == len(self.watches) else [watch for watch in silent if not watch.refused]
        return next((watch.problem for watch in counted), None)

    @property
    def watches(self) -> Sequence[Watch[T]]:
        return list(self._watches.values())

    def note(self, manifest: Manifest) -> None:
        """An object that this server has just made in one of the namespaces."""
        watch = self._watches.get(manifest["metadata"]["namespace"]) or self._watches[None]
        watch.note(manifest)

    async def _open(self, watch: Watch[T]) -> str | None:
        """Why the API refuses; None when it does not."""
        try:
            async with asyncio.timeout(OPEN_SECONDS):
                await watch.until_listed()
        except TimeoutError:
            raise StartupError(f"the {watch.what} cannot be read: {watch.trouble} (for {OPEN_SECONDS:g} s)") from None
        except ApiRefused as error:
            watch.start()
            return f"the {watch.what} cannot be read: {error}"
        return None
