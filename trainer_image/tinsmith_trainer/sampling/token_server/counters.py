"""What a sampler of somebody else's has done, counted on our side: servers' own numbers come and go with versions."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from tinsmith_trainer.sampling.base import SampleOutcome, SamplerStats
from tinsmith_trainer.sampling.token_server.drawings import Plan


class Counters:
    """Called from any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._guard = threading.Lock()
        self._clock = clock
        self._waiting = self._active = 0
        self._sampled_tokens = self._prefilled_tokens = self._prefix_hit_tokens = 0
        self._busy_seconds = self._busy_since = 0.0

    def waits(self) -> None:
        with self._guard:
            self._waiting += 1

    def begins(self) -> None:
        with self._guard:
            self._waiting -= 1
            self._active += 1
            if self._active == 1:
                self._busy_since = self._clock()

    def ends(self) -> None:
        with self._guard:
            self._active -= 1
            if not self._active:
                self._busy_seconds += self._clock() - self._busy_since

    def drew(self, plan: Plan, outcome: SampleOutcome) -> None:
        """A prompt counts once: its samples share it."""
        computed = bool(plan.drawings or plan.prefixes)
        hit = outcome.prompt_cache_hit_tokens
        with self._guard:
            self._sampled_tokens += sum(len(sequence.tokens) for sequence in outcome.sequences)
            self._prefix_hit_tokens += hit
            self._prefilled_tokens += len(plan.job.prompt) - hit if computed else 0

    def stats(self) -> SamplerStats:
        with self._guard:
            running = self._clock() - self._busy_since if self._active else 0.0
            return SamplerStats(
                active=self._active,
                waiting=self._waiting,
                sampled_tokens=self._sampled_tokens,
                prefilled_tokens=self._prefilled_tokens,
                prefix_hit_tokens=self._prefix_hit_tokens,
                busy_seconds=self._busy_seconds + running,
            )
