"""Makes sessions from the catalogue, and says what those can expect who wait for one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from tinsmith_server.fleet.kubernetes.api import KubernetesApi, Manifest
from tinsmith_server.fleet.kubernetes.catalogue import CatalogueEntry
from tinsmith_server.fleet.kubernetes.errors import AlreadyThere, ApiRefused, KubernetesError
from tinsmith_server.fleet.kubernetes.training_session import Session
from tinsmith_server.fleet.kubernetes.watching import Key
from tinsmith_server.logs import get_logger

log = get_logger(__name__)

# A spec that the cluster refuses stays refused until a human has changed something.
REFUSED_SECONDS = 30.0


class SessionProvisioner:
    """One session at a time for each need: the next one is made when the last one is at work, and full."""

    def __init__(
        self,
        api: KubernetesApi,
        catalogue: Sequence[CatalogueEntry],
        namespace: str | None,
        made: Callable[[Manifest], None],
    ) -> None:
        """Sessions are made in `namespace`; `made` hears of each one before the watch tells of it."""
        self._api = api
        self._catalogue = catalogue
        self._namespace = namespace or ""
        self._made = made
        self._turn = asyncio.Lock()
        self._refusals: dict[str, tuple[str, float]] = {}

    async def provide(self, sessions: Mapping[Key, Session], base_model: str, rank: int, sampling: bool) -> str:
        """What there is to wait for now, in words for the one who waits."""
        async with self._turn:
            fitting = [one for one in sessions.values() if one.model == base_model and one.suits(rank, sampling)]
            coming = next((one for one in fitting if one.coming), None)
            if coming is not None:
                return coming.why_not_at_work()
            entries = [entry for entry in self._catalogue if entry.suits(base_model, rank, sampling)]
            neighbours = {one.name: one for one in sessions.values() if one.namespace == self._namespace}
            for entry in entries:
                outcome = await self._grow(entry, neighbours)
                if outcome is not None:
                    return outcome
            return _nothing_more(fitting, entries) or _nothing_fits(base_model, rank, sampling)

    async def _grow(self, entry: CatalogueEntry, sessions: Mapping[str, Session]) -> str | None:
        """None when this entry can give no more. `sessions` are those of the namespace."""
        own = [session for session in sessions.values() if session.entry == entry.name]
        stalled = next((one for one in own if one.stalled and not one.deleted), None)
        if stalled is not None:
            # Another one of the same spec would fare no better.
            return stalled.why_not_at_work()
        name = entry.next_name(sessions)
        if name is None:
            return None
        reason, until = self._refusals.get(entry.name, ("", 0.0))
        if asyncio.get_running_loop().time() < until:
            return reason
        return await self._create(entry, name)

    async def _create(self, entry: CatalogueEntry, name: str) -> str:
        being_made = f"TrainingSession {self._namespace}/{name} is being made"
        try:
            made = await self._api.create_session(entry.manifest(name, self._namespace))
        except AlreadyThere:
            # Another server was faster; the watch will tell.
            return being_made
        except KubernetesError as error:
            reason = f"no session can be made from the catalogue entry {entry.name}: {error}"
            log.warning("session not made", entry=entry.name, reason=str(error))
            if isinstance(error, ApiRefused):
                self._refusals[entry.name] = (reason, asyncio.get_running_loop().time() + REFUSED_SECONDS)
            return reason
        log.info("session made", session=name, entry=entry.name)
        self._made(made)
        return being_made


def _nothing_more(sessions: Sequence[Session], entries: Sequence[CatalogueEntry]) -> str | None:
    """A human has to do something, or a model to end. None when there never was anything that fits."""
    idle = next((session for session in sessions if not session.at_work and not session.deleted), None)
    if idle is not None:
        return idle.why_not_at_work()
    if entries:
        limits = ", ".join(f"{entry.name} has all {entry.max_sessions} of its sessions" for entry in entries)
        return f"a model must end first, or an administrator raise maxSessions in the catalogue ({limits})"
    if sessions:
        return f"a model must end first, or an administrator add a TrainingSession for {sessions[0].model}"
    return None


def _nothing_fits(base_model: str, rank: int, sampling: bool) -> str:
    if sampling:
        what = f"no SamplerPool and no TrainingSession samples from {base_model}"
    else:
        what = f"no TrainingSession trains {base_model}"
    return f"{what} at LoRA rank {rank}; an administrator must add one"
