"""Keeps the cache complete across the gaps in a watch, and knows where it is.

A watch that was away for too long begins anew with a list (410 Gone), and Kopf tells each object of that list, but not
which ones have vanished meanwhile. So the answer that Kopf is given is read here as well, once for each list: what it
lacks is gone, and what goes later is told by the watch.

Each part of the scope stands for itself. Where the API server forbids the watch (no such namespace, or no rights in it)
nothing is known and nothing done, and the others do not wait for it.

The CRD of either kind of owner may be missing, or be deleted. There are no objects of that kind then, and the other
kind is served.
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
from tinsmith_operator.kube.resources import OWNERS, WATCHED, Ref, Resource
from tinsmith_operator.logs import get_logger

RETRY_SECONDS = 2.0
LOOK_FOR_KIND_SECONDS = 10.0

_CURE = "Install the CRD: `kubectl apply -f crds/`, or the chart with `crds.install: true`."

Part = str | None
"""A namespace, or None for all of them at once."""

Place = tuple[Part, str]
"""A kind, by its plural, in a part of the scope."""

log = get_logger(__name__)


class State(Enum):
    WAITS = auto()
    LISTED = auto()
    REFUSED = auto()
    UNKNOWN = auto()
    """The cluster does not know the kind."""


class Informer:
    """`complete` is set once it is known of every part what is in it, or that this is forbidden.

    entered: hears of each part that is known from now on. resources: the kinds of one watch.
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
        """Kinds that no watch has listed yet, and where."""
        waiting = [place for place, state in self._states.items() if state is State.WAITS]
        return sorted(f"{plural} in {words_for(part)}" for part, plural in waiting)

    @property
    def refused(self) -> list[str]:
        """A sentence for each part that is not looked after."""
        by_part: dict[Part, list[str]] = {}
        for (part, plural), state in self._states.items():
            if state is State.REFUSED:
                by_part.setdefault(part, []).append(plural)
        return [
            f"Nothing is done in {words_for(part)}: this operator may not list {', '.join(sorted(plurals))} there. "
            "Create the namespace, and give the operator its Role in it."
            for part, plurals in by_part.items()
        ]

    @property
    def unknown(self) -> list[str]:
        """A sentence for each kind that the cluster does not know."""
        plurals = sorted({plural for (_, plural), state in self._states.items() if state is State.UNKNOWN})
        return [f"{_unknown_words(self._resources[plural])} {_CURE} The operator serves it then." for plural in plurals]

    def knows(self, namespace: str) -> bool:
        """Whether all that is in this namespace is in the cache."""
        return self._is_known(self._scope.part_of(namespace))

    def is_refused(self, part: Part) -> bool:
        """Whether something in it may not be listed."""
        return any(self._states.get((part, plural)) is State.REFUSED for plural in self._resources)

    async def check_kinds(self) -> tuple[Resource, ...]:
        """Return the kinds to watch: Kopf looks for them once, and never watches one that comes later.

        Waits while no part of the scope can be read. Raises OperatorError when the CRDs of both kinds are missing.
        """
        while True:
            unknown: set[Resource] = set()
            readable = [await self._can_read(part, unknown) for part in self._scope.parts]
            if unknown == set(OWNERS):
                raise OperatorError(" ".join([*map(_unknown_words, OWNERS), _CURE]))
            known = tuple(resource for resource in self._resources.values() if resource not in unknown)
            if any(readable) and await self._are_told([resource for resource in OWNERS if resource in known]):
                for resource in unknown:
                    self._lose(resource)
                return known
            await asyncio.sleep(RETRY_SECONDS)

    async def wait_for_kind(self, resource: Resource) -> None:
        """Return when a kind that was missing can be watched."""
        while not (await self._is_installed(resource) and await self._are_told([resource])):
            await asyncio.sleep(LOOK_FOR_KIND_SECONDS)

    def heard(self, namespace: Part, plural: str, code: str, answer: Manifest | None, is_first: bool = True) -> None:
        """A watch of this kind begins anew: a page of its list was answered with this status."""
        place = (namespace, plural)
        if place not in self._states:
            return
        if code == "403":
            self._refuse(place)
        elif code == "404" and self._resources[plural] in OWNERS:
            self._lose_in(place)
        elif answer is not None:
            self._take_page(place, answer, is_first=is_first)

    def _take_page(self, place: Place, answer: Manifest, *, is_first: bool) -> None:
        """Nothing is kept of a page but which objects were in it: what the last one lacks as well is gone."""
        resource = self._resources[place[1]]
        items, version = read_list(resource, answer)
        listed = set() if is_first else self._listed.get(place, set())
        listed |= self._cache.note_listed(items, version)
        self._listed[place] = listed
        if next_page(answer) is None:
            self._cache.drop_unlisted(resource, place[0], self._listed.pop(place), version)
            self._accept(place)

    async def _can_read(self, part: Part, unknown: set[Resource]) -> bool:
        """Whether the owners in a part can be listed; adds the kinds that the cluster does not know."""
        for resource in OWNERS:
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
        """A part that may not be listed says so only where the kind is known."""
        try:
            await self._cluster.try_list(resource, self._scope.parts[0])
        except Refused:
            return True
        except (NotFound, Unavailable):
            return False
        return True

    async def _are_told(self, resources: Sequence[Resource]) -> bool:
        """A kind that is new can be listed a moment before the API server tells of it, and Kopf asks what it tells."""
        try:
            told = await self._cluster.kinds_of(API_VERSION)
        except (NotFound, Unavailable) as error:
            log.warning("waiting for the API server to tell of the kinds", error=str(error))
            return False
        return all(resource.plural in told for resource in resources)

    def _lose(self, resource: Resource) -> None:
        for part in self._scope.parts:
            self._lose_in((part, resource.plural))

    def _lose_in(self, place: Place) -> None:
        """The kind is unknown, so there is no object of it."""
        part, plural = place
        resource, was_known = self._resources[plural], self._is_known(part)
        if self._states[place] is not State.UNKNOWN:
            log.error("kind unknown", problem=_unknown_words(resource), cure=_CURE, where=words_for(part))
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
            log.error("forbidden, so nothing is done there", resource=plural, where=words_for(part))
        self._states[place] = State.REFUSED
        self._settle()

    def _settle(self) -> None:
        """A part with one kind that is forbidden is settled: what is in it cannot be known."""
        settled = all(self._is_known(part) or self.is_refused(part) for part in self._scope.parts)
        if settled and any(self._is_known(part) for part in self._scope.parts):
            self.complete.set()

    def _is_known(self, part: Part) -> bool:
        return all(self._states.get((part, plural)) in (State.LISTED, State.UNKNOWN) for plural in self._resources)


def _unknown_words(resource: Resource) -> str:
    return f"The cluster does not know {resource.plural}.{resource.group}."


def words_for(part: Part) -> str:
    return "the cluster" if part is None else f"namespace {part}"
