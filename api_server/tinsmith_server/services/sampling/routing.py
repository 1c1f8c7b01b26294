"""The routing of samples: to the sampler with most of the sample in its caches, unless it is far busier than others."""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from tinsmith_rpc import worker_pb2

from tinsmith_server.fleet.base import SamplerHandle

# A sampler's prefix cache shares whole blocks of this many tokens.
FIRST_BLOCK_TOKENS = 64
TOKEN_BYTES = 4
# A sampler with this many times the mean load is passed over, but not for a few samples: those of one prompt, submitted
# one by one, should stay together.
BUSIER_FACTOR = 1.5
FEW_SAMPLES = 32


@dataclass(frozen=True, slots=True)
class Load:
    """A sampler and its number of unfinished samples."""

    sampler_id: str
    unfinished: int


def cache_key(manifest_digest: str, prompt_tokens: bytes) -> bytes:
    """Return a key that is equal for samples with the same adapter, or none, and the same first block of tokens."""
    return manifest_digest.encode() + b"/" + prompt_tokens[: FIRST_BLOCK_TOKENS * TOKEN_BYTES]


def preference(key: bytes, loads: Sequence[Load]) -> list[str]:
    """Return the samplers' ids in the order of preference; far busier ones come last.

    Rendezvous hashing: a sampler that comes or goes moves only its own keys.
    """
    bound = busy_bound([load.unfinished for load in loads])
    ranked = sorted(loads, key=lambda load: _weight(key, load.sampler_id), reverse=True)
    return [load.sampler_id for load in sorted(ranked, key=lambda load: load.unfinished >= bound)]


def busy_bound(unfinished: Sequence[int]) -> int:
    """Return the number of unfinished samples that is too many; at least one sampler always has fewer."""
    if not unfinished:
        return FEW_SAMPLES
    return max(FEW_SAMPLES, math.ceil(BUSIER_FACTOR * (sum(unfinished) + 1) / len(unfinished)))


def _weight(key: bytes, sampler_id: str) -> bytes:
    return hashlib.sha256(sampler_id.encode() + b" " + key).digest()


class SamplerLoads:
    """The loads of samplers. Samples of other servers, and unseen ends, are corrected by the next refresh."""

    def __init__(self) -> None:
        self._described: dict[str, int] = {}
        self._given: defaultdict[str, set[str]] = defaultdict(set)
        self._silent: set[str] = set()

    def of(self, samplers: Iterable[SamplerHandle]) -> list[Load]:
        return [Load(one.sampler_id, self._unfinished(one.sampler_id)) for one in samplers]

    def refresh(self, descriptions: Mapping[str, worker_pb2.DescribeReply], silent: Collection[str] = ()) -> None:
        """Set the samplers' own numbers, by their ids; `silent` ones did not answer."""
        self._described = {
            sampler_id: reply.metrics.samples_active + reply.metrics.samples_waiting
            for sampler_id, reply in descriptions.items()
        }
        self._given.clear()
        self._silent = set(silent)

    def answers(self, sampler_id: str) -> bool:
        """Return whether the sampler answered its last call; True before the first one."""
        return sampler_id not in self._silent

    def note_silent(self, sampler_id: str) -> None:
        """Record that the sampler did not answer."""
        self._silent.add(sampler_id)

    def note_answer(self, sampler_id: str) -> None:
        self._silent.discard(sampler_id)

    def note_taken(self, sampler_id: str, request_id: str) -> None:
        self._given[sampler_id].add(request_id)
        self._silent.discard(sampler_id)

    def record_end(self, sampler_id: str, request_id: str) -> None:
        """Record that a result was seen here. Repeated reads count once."""
        if sampler_id in self._given:
            self._given[sampler_id].discard(request_id)

    def _unfinished(self, sampler_id: str) -> int:
        given = self._given.get(sampler_id)
        return self._described.get(sampler_id, 0) + (len(given) if given is not None else 0)
