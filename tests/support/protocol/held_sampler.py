"""A sampler whose samples end when a test says so, each with the one token that its seed is."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from support.sampler.scripted_sampler import ScriptedSampler
from tinsmith_trainer.errors import SamplerClosed, UserError
from tinsmith_trainer.sampling.base import SampleJob, SampleOutcome, Sequence
from typing_extensions import override

Done = Callable[[SampleOutcome], None]


class HeldSampler(ScriptedSampler):
    """Called from the worker's event loop alone, since nothing here has a thread."""

    def __init__(self) -> None:
        super().__init__()
        self.running: dict[str, tuple[SampleJob, Done]] = {}

    @override
    def submit(self, job: SampleJob, done: Done) -> None:
        self.running[job.request_id] = job, done

    @override
    def cancel(self, request_id: str) -> None:
        if request_id in self.running:
            _, done = self.running.pop(request_id)
            done(SampleOutcome(error=UserError("The request was cancelled.")))

    def end(self, request_id: str) -> None:
        job, done = self.running.pop(request_id)
        assert job.params.seed is not None
        drawn = Sequence(np.array([job.params.seed], np.int32), np.zeros(1, np.float32), stopped=True)
        done(SampleOutcome((drawn,), prompt_tokens=len(job.prompt)))

    def sequence_memory(self) -> str:
        return ""

    @override
    def close(self) -> None:
        for _, done in self.running.values():
            done(SampleOutcome(error=SamplerClosed("The sampler was closed.")))
        self.running.clear()
