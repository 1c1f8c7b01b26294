"""Seeds for servers, from the seed of a job."""

from __future__ import annotations

from hashlib import sha256

from tinsmith_trainer.sampling.base import SampleJob

SEED_RANGE = 2**31
"""What every server takes."""


def seed_of(job: SampleJob, index: int, purpose: str = "") -> int | None:
    """Unlike for each index of a purpose, and unrelated between jobs whose seeds are neighbours. Greedy needs none."""
    seed = job.params.seed
    if seed is None or job.params.temperature == 0:
        return None
    return (int.from_bytes(sha256(f"{purpose}{seed}".encode()).digest()[:8]) + index) % SEED_RANGE
