"""The routing of samples.

A sample is sent to the sampler that probably has most of its prompt cached, unless that sampler is much busier than
others.
"""

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
# A sampler with more than this many times the mean load comes last. A few samples are always allowed, so that samples
# of one prompt, submitted one by one, stay together.
BUSIER_FACTOR = 1.5
FEW_SAMPLES = 32


@dataclass(frozen=True, slots=True)
class Load:
    """A sampler and its number of unfinished samples."""

    sampler_id: str
    unfinished: int


def cache_key(manifest_digest: str, prompt_tokens: bytes) -> bytes:
    """Return a key that is equal for samples with the same adapter (or none) and the same first block of tokens."""
    return manifest_digest.encode() + b"/" + prompt_tokens[: FIRST_BLOCK_TOKENS * TOKEN_BYTES]


def preference(key: bytes, loads: Sequence[Load]) -> list[str]:
    """Return the samplers' IDs in the order of preference. Samplers that are much busier come last.

    The order is by rendezvous hashing: a sampler that appears or disappears moves only its own keys.
    """
    bound = busy_bound([load.unfinished for load in loads])
    ranked = sorted(loads, key=lambda load: _weight(key, load.sampler_id), reverse=True)
    return [load.sampler_id for load in sorted(ranked, key=lambda load: load.unfinished >= bound)]


def busy_bound(unfinished: Sequence[int]) -> int:
    """Return the number of unfinished samples at which a sampler counts as too busy.

    At least one sampler always has fewer unfinished samples than this number.
    """
    if not unfinished:
        return FEW_SAMPLES
    return max(FEW_SAMPLES, math.ceil(BUSIER_FACTOR * (sum(unfinished) + 1) / len(unfinished)))


def _weight(key: bytes, sampler_id: str) -> bytes:
    return hashlib.sha256(sampler_id.encode() + b" " + key).digest()


class SamplerLoads:
    """The loads of samplers.

    Samples of other servers, and ended samples that this server has not read, count after the next refresh.
    """

    def __init__(self) -> None:
        self._described: dict[str, int] = {}
        self._unread: defaultdict[str, set[str]] = defaultdict(set)
        self._silent: set[str] = set()

    def of(self, samplers: Iterable[SamplerHandle]) -> list[Load]:
        return [Load(one.sampler_id, self._unfinished(one.sampler_id)) for one in samplers]

    def refresh(self, descriptions: Mapping[str, worker_pb2.DescribeReply], silent: Collection[str] = ()) -> None:
        """Set the numbers of unfinished samples that samplers reported, by sampler ID.

        The samplers in `silent` did not answer.
        """
        self._described = {
            sampler_id: reply.metrics.samples_active + reply.metrics.samples_waiting
            for sampler_id, reply in descriptions.items()
        }
        self._unread.clear()
        self._silent = set(silent)

    def answers(self, sampler_id: str) -> bool:
        """Return whether the sampler answered its last call. Before the first call, return True."""
        return sampler_id not in self._silent

    def note_silent(self, sampler_id: str) -> None:
        """Record that the sampler did not answer."""
        self._silent.add(sampler_id)

    def note_answer(self, sampler_id: str) -> None:
        self._silent.discard(sampler_id)

    def note_taken(self, sampler_id: str, request_id: str) -> None:
        self._unread[sampler_id].add(request_id)
        self._silent.discard(sampler_id)

    def record_end(self, sampler_id: str, request_id: str) -> None:
        """Record that this server has read a sample's result. A result that is read repeatedly counts once."""
        if sampler_id in self._unread:
            self._unread[sampler_id].discard(request_id)

    def _unfinished(self, sampler_id: str) -> int:
        request_ids = self._unread.get(sampler_id)
        return self._described.get(sampler_id, 0) + (len(request_ids) if request_ids is not None else 0)
