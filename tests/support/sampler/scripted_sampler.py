"""A sampler that draws nothing: it answers at once, or when a test says so."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from tinsmith_trainer.engines.base import AdapterState
from tinsmith_trainer.errors import SamplerClosed
from tinsmith_trainer.sampling.base import SampleJob, SampleOutcome, SamplerStats, Sequence
from tinsmith_trainer.sampling.language import Language

SEVEN = SampleOutcome(
    (Sequence(np.array([7], np.int32), np.array([-0.5], np.float32), stopped=True),),
    prompt_cache_hit_tokens=1,
    prompt_tokens=3,
)


class ScriptedSampler:
    """Answers at once, or holds its jobs; fails where a test says so."""

    def __init__(self) -> None:
        self.held: list[Callable[[SampleOutcome], None]] = []
        self.holds = False
        self.error: Exception | None = None
        self.jobs: list[SampleJob] = []
        self.cancelled: list[str] = []
        self.language: Language | None = None
        self.unready_reason: str | None = None

    def load_adapter(self, adapter_key: str, state: AdapterState) -> None:
        if self.error is not None:
            raise self.error

    def has_adapter(self, adapter_key: str) -> bool:
        return True

    def drop_adapter(self, adapter_key: str) -> None: ...

    def submit(self, job: SampleJob, done: Callable[[SampleOutcome], None]) -> None:
        if self.error is not None:
            raise self.error
        self.jobs.append(job)
        if self.holds:
            self.held.append(done)
        else:
            done(SEVEN)

    def finish(self, outcome: SampleOutcome = SEVEN) -> None:
        """End the held samples."""
        while self.held:
            self.held.pop()(outcome)

    def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)

    def stats(self) -> SamplerStats:
        return SamplerStats(0, 0, 0, 0, 0, 0.0)

    def close(self) -> None:
        self.finish(SampleOutcome(error=SamplerClosed("The sampler was closed.")))
