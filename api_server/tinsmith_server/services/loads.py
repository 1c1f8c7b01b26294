"""How busy samplers are: what each one last said of itself, and what this server has given it since."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping

from tinsmith_rpc import worker_pb2

from tinsmith_server.fleet.base import SamplerHandle
from tinsmith_server.services.routing import Load


class Loads:
    """What other servers give shows with the next look, and so does what ended unseen here: no error lasts."""

    def __init__(self) -> None:
        self._said: dict[str, int] = {}
        self._given: defaultdict[str, set[str]] = defaultdict(set)
        self._silent: set[str] = set()

    def of(self, samplers: Iterable[SamplerHandle]) -> list[Load]:
        return [Load(one.sampler_id, self._unfinished(one.sampler_id)) for one in samplers]

    def look(self, descriptions: Mapping[str, worker_pb2.DescribeReply], silent: Collection[str] = ()) -> None:
        """What the samplers said just now, by their ids; those that were asked in vain are `silent`."""
        self._said = {
            sampler_id: reply.metrics.samples_active + reply.metrics.samples_waiting
            for sampler_id, reply in descriptions.items()
        }
        self._given.clear()
        self._silent = set(silent)

    def answers(self, sampler_id: str) -> bool:
        """Whether it took or said something when it was last asked; of one that never was, that is assumed."""
        return sampler_id not in self._silent

    def note_silent(self, sampler_id: str) -> None:
        """It did not take a sample, and did not say that it is full."""
        self._silent.add(sampler_id)

    def note_taken(self, sampler_id: str, request_id: str) -> None:
        self._given[sampler_id].add(request_id)
        self._silent.discard(sampler_id)

    def note_ended(self, sampler_id: str, request_id: str) -> None:
        """Its result was seen here. Repeated reads count once."""
        if sampler_id in self._given:
            self._given[sampler_id].discard(request_id)

    def _unfinished(self, sampler_id: str) -> int:
        given = self._given.get(sampler_id)
        return self._said.get(sampler_id, 0) + (len(given) if given is not None else 0)
