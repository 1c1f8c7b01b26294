"""The informer, which keeps the cache up to date.

The informer keeps the cache complete across gaps in a watch, and records which parts of the scope are complete.

A watch that was interrupted for too long starts again with a list (410 Gone). Kopf reports the objects in the list, but
does not report objects that have vanished. This module reads the list of the watch too, and removes the objects that
are missing from the list.

The parts of the scope are independent. The API server forbids the watch in a part if the namespace does not exist, or
if the operator has no rights in it. In a forbidden part, the operator does nothing, and the other parts of the scope
are not delayed.

The CRD of sessions or of pools may be missing, or may be deleted later. A cluster without the CRD of a kind has no
objects of this kind, and the operator serves only the other kind.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from enum import Enum, auto

from tinsmith_operator.api.base import Manifest
from tinsmith_operator.api.names import API_VERSION
from tinsmith_operator.errors import NotFound, OperatorError, Refused, Unavailable
from tinsmith_operator.installation import Scope
from tinsmith_operator.kube.cache import Cache
from tinsmith_operator.kube.client import Cluster, next_page, read_list
from tinsmith_operator.kube.resources import OWNERS, RECONCILED, WATCHED, Ref, Resource
from tinsmith_operator.logs import get_logger

RETRY_SECONDS = 2.0
LOOK_FOR_KIND_SECONDS = 10.0

_CURE = "Install the CRD: `kubectl apply -f crds/`, or the chart with `crds.install: true`."

Part = str | None
"""A namespace, or None for all namespaces together."""

Place = tuple[Part, str]
"""A part of the scope, and the plural of a kind."""

log = get_logger(__name__)


class State(Enum):
    WAITS = auto()
    LISTED = auto()
    REFUSED = auto()
    UNKNOWN = auto()
    """The cluster does not know the kind."""


class Informer:
    """The state of each kind in each part. `complete` is set when every part is listed or forbidden.

    - `entered`: called when the state of a part becomes known; the argument is the part.
    - `resources`: the kinds that one watch covers.
    """

    def __init__(
        self,
        cluster: Cluster,
        cache: Cache,
        scope: Scope,
        entered: Callable[[Part], None],
        resources: Sequence[Resource] = WATCHED,
    ) -> None:
        self._resources = {resource.plural: resource for resource in resources}
        self._cluster = cluster
        self._cache = cache
        self._scope = scope
        self._entered = entered
        self._states: dict[Place, State] = {
            (part, plural): State.WAITS for part in scope.parts for plural in self._resources
        }
        self._listed: dict[Place, set[Ref]] = {}
        self.complete = asyncio.Event()

    @property
    def missing(self) -> list[str]:
        """The kinds and namespaces that no watch has listed yet."""
        waiting = [place for place, state in self._states.items() if state is State.WAITS]
        return sorted(f"{plural} in {words_for(part)}" for part, plural in waiting)

    @property
    def refused(self) -> list[str]:
        """Sentences about the parts that the operator may not list: one sentence for each part."""
        by_part: dict[Part, list[str]] = {}
        for (part, plural), state in self._states.items():
            if state is State.REFUSED:
                by_part.setdefault(part, []).append(plural)
        return [
            f"The operator does nothing in {words_for(part)}, because it may not list "
            f"{', '.join(sorted(plurals))} there. Create the namespace, and bind the operator's Role in it."
            for part, plurals in by_part.items()
        ]

    @property
    def unknown(self) -> list[str]:
        """Sentences about the kinds without a CRD: one sentence for each kind."""
        plurals = sorted({plural for (_, plural), state in self._states.items() if state is State.UNKNOWN})
        return [f"{_unknown_words(self._resources[plural])} {_CURE} The operator then serves it." for plural in plurals]

    def knows(self, namespace: str) -> bool:
        """Return whether the cache has all objects in this namespace."""
        return self._is_known(self._scope.part_of(namespace))

    def is_refused(self, part: Part) -> bool:
        """Return whether the operator is forbidden to list a kind in this part."""
        return any(self._states.get((part, plural)) is State.REFUSED for plural in self._resources)

    async def check_kinds(self) -> tuple[Resource, ...]:
        """Return the kinds to watch.

        Kopf looks for kinds only once, so a kind that is added later needs a separate watch.

        The method waits while no part of the scope can be read. Raises OperatorError if the CRDs of sessions and
        pools are missing.
        """
        while True:
            unknown: set[Resource] = set()
            readable = [await self._can_read(part, unknown) for part in self._scope.parts]
            if unknown >= set(OWNERS):
                raise OperatorError(" ".join([*map(_unknown_words, OWNERS), _CURE]))
            known = tuple(resource for resource in self._resources.values() if resource not in unknown)
            if any(readable) and await self._are_discovered([resource for resource in RECONCILED if resource in known]):
                for resource in unknown:
                    self._lose(resource)
                return known
            await asyncio.sleep(RETRY_SECONDS)

    async def wait_for_kind(self, resource: Resource) -> None:
        """Wait until a kind that was missing can be watched."""
        while not (await self._is_installed(resource) and await self._are_discovered([resource])):
            await asyncio.sleep(LOOK_FOR_KIND_SECONDS)

    def on_list(self, namespace: Part, plural: str, code: str, answer: Manifest | None, is_first: bool = True) -> None:
        """Process a page of the list that starts a watch of this kind. `code` is the status of the answer."""
        place = (namespace, plural)
        if place not in self._states:
            return
        if code == "403":
            self._refuse(place)
        elif code == "404" and self._resources[plural] in RECONCILED:
            self._lose_in(place)
        elif answer is not None:
            self._take_page(place, answer, is_first=is_first)

    def _take_page(self, place: Place, answer: Manifest, *, is_first: bool) -> None:
        """Store the objects of a page. After the last page, remove from the cache each object that was on no page."""
        resource = self._resources[place[1]]
        items, version = read_list(resource, answer)
        listed = set() if is_first else self._listed.get(place, set())
        listed |= self._cache.note_listed(items, version)
        self._listed[place] = listed
        if next_page(answer) is None:
            self._cache.drop_unlisted(resource, place[0], self._listed.pop(place), version)
            self._accept(place)

    async def _can_read(self, part: Part, unknown: set[Resource]) -> bool:
        """Return whether the operator can list sessions and pools in a part.

        Add kinds without a CRD to `unknown`.
        """
        for resource in RECONCILED:
            try:
                await self._cluster.try_list(resource, part)
            except NotFound:
                unknown.add(resource)
            except Refused:
                self._refuse((part, resource.plural))
                return False
            except Unavailable as error:
                log.warning("waiting for the API server", error=str(error))
                return False
        return True

    async def _is_installed(self, resource: Resource) -> bool:
        """Return whether the kind exists. The API server answers "forbidden" only for kinds that it knows."""
        try:
            await self._cluster.try_list(resource, self._scope.parts[0])
        except Refused:
            return True
        except (NotFound, Unavailable):
            return False
        return True

    async def _are_discovered(self, resources: Sequence[Resource]) -> bool:
        """Return whether the discovery document contains these kinds.

        Kopf uses the discovery document, but a new kind can be listed slightly before the document contains the kind.
        """
        try:
            plurals = await self._cluster.kinds_of(API_VERSION)
        except (NotFound, Unavailable) as error:
            log.warning("waiting for the API server's discovery", error=str(error))
            return False
        return all(resource.plural in plurals for resource in resources)

    def _lose(self, resource: Resource) -> None:
        for part in self._scope.parts:
            self._lose_in((part, resource.plural))

    def _lose_in(self, place: Place) -> None:
        """Record that the kind is unknown in this place, and drop the objects of the kind."""
        part, plural = place
        resource, was_known = self._resources[plural], self._is_known(part)
        if self._states[place] is not State.UNKNOWN:
            log.error("CRD missing", problem=_unknown_words(resource), cure=_CURE, where=words_for(part))
            self._states[place] = State.UNKNOWN
            self._cache.drop_kind(resource, part)
        if not was_known and self._is_known(part):
            self._entered(part)
        self._settle()

    def _accept(self, place: Place) -> None:
        part, before = place[0], self._states[place]
        self._states[place] = State.LISTED
        if before is not State.LISTED and self._is_known(part):
            log.info("watching", where=words_for(part))
            self._entered(part)
        self._settle()

    def _refuse(self, place: Place) -> None:
        part, plural = place
        if self._states[place] is not State.REFUSED:
            log.error("list forbidden", resource=plural, where=words_for(part))
        self._states[place] = State.REFUSED
        self._settle()

    def _settle(self) -> None:
        """Set `complete` if every part is known or forbidden, and at least one part is known."""
        settled = all(self._is_known(part) or self.is_refused(part) for part in self._scope.parts)
        if settled and any(self._is_known(part) for part in self._scope.parts):
            self.complete.set()

    def _is_known(self, part: Part) -> bool:
        return all(self._states.get((part, plural)) in (State.LISTED, State.UNKNOWN) for plural in self._resources)


def _unknown_words(resource: Resource) -> str:
    return f"The CRD {resource.plural}.{resource.group} is not installed."


def words_for(part: Part) -> str:
    return "the cluster" if part is None else f"namespace {part}"
