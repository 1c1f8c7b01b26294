"""Samples in flight: each one ends, whatever the sampler does, and none is kept for ever."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.reference_engine import ReferenceEngine
from tinsmith_rpc import worker_pb2
from tinsmith_trainer import samples as samples_module
from tinsmith_trainer.checkpoints import CheckpointRoot
from tinsmith_trainer.engines.base import AdapterState, LoraSpec
from tinsmith_trainer.operations import Failure, Success
from tinsmith_trainer.samples import Samples, TooManySamples
from tinsmith_trainer.sampling.base import SampleJob, SampleOutcome, SamplerStats, Sequence

WAIT_SECONDS = 5.0


class ScriptedSampler:
    """Answers at once, or holds its jobs; fails where a test says so."""

    def __init__(self) -> None:
        self.held: list[Callable[[SampleOutcome], None]] = []
        self.holds = False
        self.error: Exception | None = None
        self.jobs: list[SampleJob] = []

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
            token = Sequence(np.array([7], np.int32), np.array([-0.5], np.float32), stopped=True)
            done(SampleOutcome((token,)))

    def cancel(self, request_id: str) -> None: ...

    def stats(self) -> SamplerStats:
        return SamplerStats(0, 0, 0, 0, 0, 0.0)

    def close(self) -> None: ...


@pytest.fixture
def sampler() -> ScriptedSampler:
    return ScriptedSampler()


@pytest.fixture
async def samples(sampler: ScriptedSampler, tmp_path: Path) -> Samples:
    return Samples(sampler, CheckpointRoot(f"file://{tmp_path}"), ReferenceEngine().base_model())


def request(request_id: str, adapter: worker_pb2.AdapterRef | None = None) -> worker_pb2.SampleRequest:
    return worker_pb2.SampleRequest(
        request_id=request_id, adapter=adapter, prompt_tokens=np.array([1], "<i4").tobytes(), num_samples=1
    )


def saved_adapter(root: Path) -> worker_pb2.AdapterRef:
    engine = ReferenceEngine()
    engine.create_adapter("a", LoraSpec(rank=2, alpha=32.0, seed=1))
    checkpoints = CheckpointRoot(f"file://{root}")
    written = checkpoints.write("s:train:0", 1, 1, "sampler", engine.state("a"), engine.base_model(), "ephemeral")
    return worker_pb2.AdapterRef(directory=written.directory, manifest_digest=written.manifest_digest)


async def test_the_same_id_again_is_the_same_sample(samples: Samples, sampler: ScriptedSampler) -> None:
    for _ in range(3):
        samples.submit(request("a"))
    assert isinstance(await samples.wait("a", WAIT_SECONDS), Success)
    assert len(sampler.jobs) == 1


async def test_a_finished_sample_is_there_for_who_does_not_wait(samples: Samples) -> None:
    samples.submit(request("a"))
    first = await samples.wait("a", WAIT_SECONDS)
    assert await samples.wait("a", 0) is first


@pytest.mark.parametrize("with_adapter", [False, True], ids=["at-submit", "at-load"])
async def test_a_sampler_that_breaks_fails_the_sample_instead_of_hanging_it(
    samples: Samples, sampler: ScriptedSampler, tmp_path: Path, with_adapter: bool
) -> None:
    sampler.error = RuntimeError("out of memory")
    samples.submit(request("a", saved_adapter(tmp_path) if with_adapter else None))
    assert await samples.wait("a", WAIT_SECONDS) == Failure("server", "RuntimeError: out of memory")
    assert samples.unfinished == 0


async def test_an_adapter_that_failed_to_load_is_tried_again(
    samples: Samples, sampler: ScriptedSampler, tmp_path: Path
) -> None:
    adapter = saved_adapter(tmp_path)
    sampler.error = RuntimeError("out of memory")
    samples.submit(request("a", adapter))
    await samples.wait("a", WAIT_SECONDS)
    sampler.error = None
    samples.submit(request("b", adapter))
    assert isinstance(await samples.wait("b", WAIT_SECONDS), Success)


async def test_results_past_their_time_are_forgotten_also_behind_an_unfinished_one(
    samples: Samples, sampler: ScriptedSampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler.holds = True
    samples.submit(request("slow"))
    await samples.wait("slow", 0)
    sampler.holds = False
    samples.submit(request("old"))
    await samples.wait("old", WAIT_SECONDS)
    monkeypatch.setattr(samples_module, "KEEP_RESULTS_SECONDS", -1.0)
    samples.submit(request("new"))
    with pytest.raises(KeyError):
        await samples.wait("old", 0)
    assert await samples.wait("slow", 0) is None


async def test_too_many_are_held_back(samples: Samples, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples_module, "MAX_WAITING_SAMPLES", 1)
    samples.submit(request("a"))
    with pytest.raises(TooManySamples):
        samples.submit(request("b"))
