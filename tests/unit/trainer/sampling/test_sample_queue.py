"""Samples in flight: each one ends, whatever the sampler does, and none is kept for ever."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
from support.engine.reference import ReferenceEngine
from support.sampler.scripted_sampler import ScriptedSampler
from tinsmith_rpc import wire_pb2, worker_pb2
from tinsmith_trainer.checkpoints.checkpoint_root import CheckpointRoot
from tinsmith_trainer.checkpoints.storage import CheckpointStorage
from tinsmith_trainer.engines.base import LoraSpec
from tinsmith_trainer.errors import Draining, SamplerClosed
from tinsmith_trainer.oplog.journal_tables import Failure
from tinsmith_trainer.sampling import sample_queue as samples_module
from tinsmith_trainer.sampling.base import SampleOutcome
from tinsmith_trainer.sampling.codec import unpacked_bytes
from tinsmith_trainer.sampling.sample_queue import Samples, TooManySamples
from tinsmith_trainer.sampling.sampler_adapters import AdapterLimits, SamplerAdapters

WAIT_SECONDS = 20.0


@pytest.fixture
def sampler() -> ScriptedSampler:
    return ScriptedSampler()


@pytest.fixture
async def samples(sampler: ScriptedSampler, tmp_path: Path) -> Samples:
    base, limits = ReferenceEngine().base_model(), AdapterLimits(max_loaded=8, max_rank=16)
    return Samples(sampler, SamplerAdapters(sampler, CheckpointRoot(f"file://{tmp_path}"), base, limits))


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
    assert isinstance(await samples.wait("a", WAIT_SECONDS), bytes)
    assert len(sampler.jobs) == 1


async def test_results_that_nobody_fetched_make_room_without_another_request(
    samples: Samples, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(samples_module, "KEEP_RESULT_BYTES", 1)
    for name in "abcdef":
        samples.submit(request(name))
    waiting = [asyncio.create_task(samples.wait(name, WAIT_SECONDS)) for name in "abcdef"]
    # Whoever waits has it, also of those that are gone by then.
    results = await asyncio.gather(*waiting)
    assert all(isinstance(result, bytes) for result in results)
    with pytest.raises(KeyError):
        await samples.wait("a", WAIT_SECONDS)


def test_what_an_answer_may_take_counts_before_it_is_there() -> None:
    plain = request("a")
    asking = request("a")
    asking.topk_prompt_logprobs, asking.topk_sample_logprobs, asking.max_tokens = 20, 10, 100
    assert unpacked_bytes(asking) - unpacked_bytes(plain) == 8 * (20 * 1 + 10 * 100)


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
    assert isinstance(await samples.wait("b", WAIT_SECONDS), bytes)


async def test_a_sample_whose_adapter_cannot_be_read_now_is_forgotten_after_a_pause_rather_than_failed(
    samples: Samples, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client submits it again, and it works when storage is back."""
    monkeypatch.setattr(samples_module, "STORAGE_PAUSE_SECONDS", 0.2)
    adapter = saved_adapter(tmp_path)
    with monkeypatch.context() as outage:

        def refuse(storage: CheckpointStorage, path: str) -> bytes:
            raise ConnectionRefusedError("no connection")

        outage.setattr(CheckpointStorage, "_read_file", refuse)
        samples.submit(request("a", adapter))
        assert await samples.wait("a", 0.05) is None
        with pytest.raises(KeyError):
            await samples.wait("a", WAIT_SECONDS)
    assert samples.unfinished == 0
    await asyncio.wait_for(samples.drained(), WAIT_SECONDS)
    samples.submit(request("a", adapter))
    assert isinstance(await samples.wait("a", WAIT_SECONDS), bytes)


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


async def test_samples_that_would_fill_the_memory_are_held_back_however_small_they_came(
    samples: Samples, sampler: ScriptedSampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    sparse = wire_pb2.Tensor(sparse_csr=wire_pb2.SparseCsr(), dtype=wire_pb2.INT64, shape=[1000, 1000])
    large = [request(request_id) for request_id in ("a", "b", "c")]
    for one in large:
        one.target_prompt_logprobs.CopyFrom(sparse)
    monkeypatch.setattr(samples_module, "MAX_WAITING_BYTES", 1000)
    samples.submit(large[0])  # alone it may be larger
    with pytest.raises(TooManySamples):
        samples.submit(large[1])
    with pytest.raises(TooManySamples):
        samples.submit(request("small"))
    assert isinstance(await samples.wait("a", WAIT_SECONDS), Failure)  # its tensor lists no rows
    samples.submit(large[2])


async def test_one_cancelled_while_its_adapter_is_loaded_is_never_drawn(
    samples: Samples, sampler: ScriptedSampler, tmp_path: Path
) -> None:
    samples.submit(request("a", saved_adapter(tmp_path)))
    samples.cancel("a")
    outcome = await samples.wait("a", WAIT_SECONDS)
    assert outcome == Failure("user", "The request was cancelled.")
    assert (sampler.jobs, sampler.cancelled) == ([], ["a"])
    assert len(samples.adapters) == 1


async def test_one_that_drains_takes_nothing_new_and_answers_for_what_it_has(
    samples: Samples, sampler: ScriptedSampler
) -> None:
    sampler.holds = True
    samples.submit(request("a"))
    samples.stop_taking()
    with pytest.raises(Draining, match="takes no more samples"):
        samples.submit(request("b"))
    samples.submit(request("a"))
    leaving = asyncio.create_task(samples.drained())
    await samples.wait("a", 0)
    sampler.finish()
    assert isinstance(await samples.wait("a", WAIT_SECONDS), bytes)
    await asyncio.wait_for(leaving, WAIT_SECONDS)
    assert isinstance(await samples.wait("a", 0), bytes)


async def test_one_that_drains_does_not_stay_for_what_nobody_wants(samples: Samples, sampler: ScriptedSampler) -> None:
    samples.submit(request("done"))
    await samples.wait("done", 0)
    samples.cancel("done")
    sampler.holds = True
    samples.submit(request("a"))
    await samples.wait("a", 0)
    samples.cancel("a")
    samples.stop_taking()
    sampler.finish()
    await asyncio.wait_for(samples.drained(), WAIT_SECONDS)


async def test_samples_that_end_with_their_sampler_are_as_if_they_had_never_been(
    samples: Samples, sampler: ScriptedSampler
) -> None:
    """Not found, a client submits again; a failure, it would give up."""
    sampler.holds = True
    samples.submit(request("a"))
    asked = asyncio.create_task(samples.wait("a", WAIT_SECONDS))
    await samples.wait("a", 0)
    sampler.finish(SampleOutcome(error=SamplerClosed("closed")))
    with pytest.raises(KeyError):
        await asked
    with pytest.raises(KeyError):
        await samples.wait("a", 0)
    assert samples.unfinished == 0
    await asyncio.wait_for(samples.drained(), WAIT_SECONDS)
