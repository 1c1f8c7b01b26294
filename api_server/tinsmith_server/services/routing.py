"""Which sampler gets a sample: the one that has most of it in its caches, unless that is far busier than the others.

Pure, and the same on every server but for how busy the samplers are thought to be: samples of one adapter that
begin alike go the same way, so that its weights and the keys and values of the prompt are computed once.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

# What a sampler's prefix cache shares is whole blocks of this many tokens.
FIRST_BLOCK_TOKENS = 64
TOKEN_BYTES = 4
# A sampler is passed over above this many times the mean of all, but never for a handful of samples: those of one
# prompt, asked for one by one, belong together.
BUSIER_FACTOR = 1.5
FEW_SAMPLES = 32


@dataclass(frozen=True, slots=True)
class Load:
    """A sampler, and the samples that it has not finished."""

    sampler_id: str
    unfinished: int


def cache_key(manifest_digest: str, prompt_tokens: bytes) -> bytes:
    """Equal for samples that share what a sampler caches: the adapter (none: empty) and the prompt's first block."""
    return manifest_digest.encode() + b"/" + prompt_tokens[: FIRST_BLOCK_TOKENS * TOKEN_BYTES]


def preference(key: bytes, loads: Sequence[Load]) -> list[str]:
    """The samplers' ids in the order in which to ask them; those that are far busier than the others come last.

    Rendezvous hashing: a sampler that comes or goes moves only the keys that are its own.
    """
    bound = busy_bound([load.unfinished for load in loads])
    ranked = sorted(loads, key=lambda load: _weight(key, load.sampler_id), reverse=True)
    return [load.sampler_id for load in sorted(ranked, key=lambda load: load.unfinished >= bound)]


def busy_bound(unfinished: Sequence[int]) -> int:
    """So many unfinished samples are too many; at least one sampler always has fewer."""
    if not unfinished:
        return FEW_SAMPLES
    return max(FEW_SAMPLES, math.ceil(BUSIER_FACTOR * (sum(unfinished) + 1) / len(unfinished)))


def _weight(key: bytes, sampler_id: str) -> bytes:
    return hashlib.sha256(sampler_id.encode() + b" " + key).digest()
