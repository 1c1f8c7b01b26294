"""Samples in flight: each one ends, whatever the sampler does, and none is kept without limit."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.engine.reference import ReferenceEngine
from support.sampler.scripted_sampler import SEVEN, ScriptedSampler
from tinsmith_rpc import wire_pb2, worker_pb2
from tinsmith_trainer.checkpoints.checkpoint_root import CheckpointRoot
from tinsmith_trainer.checkpoints.storage import CheckpointStorage
from tinsmith_trainer.engines.base import LoraSpec
from tinsmith_trainer.errors import Draining, Failure, SamplerClosed, SamplerUnready, UserError
from tinsmith_trainer.sampling import sample_queue as samples_module
from tinsmith_trainer.sampling.base import DrawnToken, SampleOutcome, TopkLogprobs
from tinsmith_trainer.sampling.checks import MOST_ECHOED_TEXTS
from tinsmith_trainer.sampling.codec import unpacked_bytes
from tinsmith_trainer.sampling.sample_queue import QueueLimits, Samples, TooManySamples
from tinsmith_trainer.sampling.sampler_adapters import AdapterLimits, SamplerAdapters
from tinsmith_trainer.sampling.weight_sources import WeightSources

WAIT_SECONDS = 20.0
TENANT = "tenant"


@pytest.fixture
def sampler() -> ScriptedSampler:
    return ScriptedSampler()


@pytest.fixture
def limits() -> QueueLimits:
    """Return the default limits; a test with other limits passes a parameter."""
    return QueueLimits()


@pytest.fixture
async def samples(sampler: ScriptedSampler, tmp_path: Path, limits: QueueLimits) -> Samples:
    base, loaded = ReferenceEngine().base_model(), AdapterLimits(max_loaded=8, max_rank=16)
    adapters = SamplerAdapters(sampler, WeightSources(CheckpointRoot(f"file://{tmp_path}"), base), loaded)
    return Samples(sampler, adapters, limits)


def request(request_id: str, adapter: worker_pb2.AdapterRef | None = None) -> worker_pb2.SampleRequest:
    return worker_pb2.SampleRequest(
        request_id=request_id, adapter=adapter, prompt_tokens=np.array([1], "<i4").tobytes(), num_samples=1
    )


def echo(request_id: str, tokens: int = 3, likeliest: int = 1) -> worker_pb2.SampleRequest:
    """Return a request of `tokens` tokens, with their logprobs and the likeliest ones."""
    asked = request(request_id)
    asked.prompt_tokens = np.ones(tokens, "<i4").tobytes()
    asked.prompt_logprobs, asked.topk_prompt_logprobs = True, likeliest
    asked.reading.CopyFrom(worker_pb2.Reading(echo=True, logprobs=True))
    return asked


class Letters:
    """A language in which each token is the letter x. Says which threads ask it, and fails where a test says so."""

    eos_token_ids = (0,)
    special_tokens: frozenset[int] = frozenset()

    def __init__(self) -> None:
        self.threads: set[int] = set()
        self.error: Exception | None = None

    @property
    def tokenizer(self) -> Letters:
        return self

    def __call__(self, text: str, **how: bool) -> dict[str, list[int]]:
        return {"input_ids": [1] * len(text)}

    def decode(self, tokens: list[int], **how: bool) -> str:
        self.threads.add(threading.get_ident())
        if self.error is not None:
            raise self.error
        return "x" * len(tokens)

    def render(self, request: worker_pb2.RenderPromptRequest) -> list[int]:
        return [1]

    def message_parser(self, prompt: object, tools: str) -> None:
        return None


async def settle() -> None:
    """Wait until every sample waits for an event from outside."""
    for _ in range(20):
        await asyncio.sleep(0)


async def until_held(sampler: ScriptedSampler, samples: int) -> None:
    """Wait until this many samples of other threads have reached the sampler."""
    async with asyncio.timeout(WAIT_SECONDS):
        while len(sampler.held) < samples:
            await asyncio.sleep(0.01)


def saved_adapter(root: Path) -> worker_pb2.AdapterRef:
    engine = ReferenceEngine()
    engine.create_adapter("a", LoraSpec(rank=2, alpha=32.0, seed=1))
    checkpoints = CheckpointRoot(f"file://{root}")
    written = checkpoints.write("s:train:0", 1, 1, "sampler", engine.state("a"), engine.base_model(), "ephemeral")
    return worker_pb2.AdapterRef(directory=written.directory, manifest_digest=written.manifest_digest)


@pytest.mark.parametrize("limits", [QueueLimits(result_bytes=1)])
async def test_unfetched_results_make_room_without_another_request(samples: Samples) -> None:
    for name in "abcdef":
        samples.submit(request(name), TENANT)
    waiting = [asyncio.create_task(samples.wait(name, WAIT_SECONDS)) for name in "abcdef"]
    # Every waiter has its result, even if the queue has dropped the result by then.
    results = await asyncio.gather(*waiting)
    assert all(isinstance(result, bytes) for result in results)
    with pytest.raises(KeyError):
        await samples.wait("a", WAIT_SECONDS)


def test_the_largest_possible_answer_counts_before_it_exists() -> None:
    plain = request("a")
    asking = request("a")
    asking.topk_prompt_logprobs, asking.topk_sample_logprobs, asking.max_tokens = 20, 10, 100
    assert unpacked_bytes(asking) - unpacked_bytes(plain) == 8 * (20 * 1 + 10 * 100)


@pytest.mark.parametrize("with_adapter", [False, True], ids=["at-submit", "at-load"])
async def test_a_sampler_that_breaks_fails_the_sample_instead_of_hanging_it(
    samples: Samples, sampler: ScriptedSampler, tmp_path: Path, with_adapter: bool
) -> None:
    sampler.error = RuntimeError("out of memory")
    samples.submit(request("a", saved_adapter(tmp_path) if with_adapter else None), TENANT)
    assert await samples.wait("a", WAIT_SECONDS) == Failure("server", "RuntimeError: out of memory")
    assert samples.unfinished == 0


@pytest.mark.parametrize("outcome", [SEVEN, SampleOutcome(error=SamplerClosed("closed"))], ids=["done", "dropped"])
async def test_a_sample_has_an_age_until_it_ends(
    samples: Samples, sampler: ScriptedSampler, outcome: SampleOutcome
) -> None:
    sampler.holds = True
    samples.submit(request("a"), TENANT)
    await settle()
    assert samples.load.oldest_seconds() > 0
    sampler.finish(outcome)
    await settle()
    assert samples.load.oldest_seconds() == 0


async def test_an_adapter_that_failed_to_load_is_tried_again(
    samples: Samples, sampler: ScriptedSampler, tmp_path: Path
) -> None:
    adapter = saved_adapter(tmp_path)
    sampler.error = RuntimeError("out of memory")
    samples.submit(request("a", adapter), TENANT)
    await samples.wait("a", WAIT_SECONDS)
    sampler.error = None
    samples.submit(request("b", adapter), TENANT)
    assert isinstance(await samples.wait("b", WAIT_SECONDS), bytes)


async def test_a_sample_is_forgotten_after_a_pause_and_not_failed_when_its_adapter_cannot_be_read(
    samples: Samples, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client submits it again, and it works when storage is back."""
    monkeypatch.setattr(samples_module, "STORAGE_PAUSE_SECONDS", 0.2)
    adapter = saved_adapter(tmp_path)
    with monkeypatch.context() as outage:

        def refuse(storage: CheckpointStorage, *args: object) -> bytes:
            raise ConnectionRefusedError("no connection")

        outage.setattr(CheckpointStorage, "_read_file_hashed", refuse)
        samples.submit(request("a", adapter), TENANT)
        assert await samples.wait("a", 0.05) is None
        with pytest.raises(KeyError):
            await samples.wait("a", WAIT_SECONDS)
    assert samples.unfinished == 0
    await asyncio.wait_for(samples.drained(), WAIT_SECONDS)
    samples.submit(request("a", adapter), TENANT)
    assert isinstance(await samples.wait("a", WAIT_SECONDS), bytes)


@pytest.mark.parametrize("limits", [QueueLimits(result_seconds=0.0)])
async def test_results_past_their_time_are_forgotten_also_behind_an_unfinished_one(
    samples: Samples, sampler: ScriptedSampler
) -> None:
    sampler.holds = True
    samples.submit(request("slow"), TENANT)
    await samples.wait("slow", 0)
    sampler.holds = False
    samples.submit(request("old"), TENANT)
    await samples.wait("old", WAIT_SECONDS)
    samples.submit(request("new"), TENANT)
    with pytest.raises(KeyError):
        await samples.wait("old", 0)
    assert await samples.wait("slow", 0) is None


@pytest.mark.parametrize("limits", [QueueLimits(waiting_samples=8)])
async def test_a_tenant_is_held_back_at_half_and_others_find_room(samples: Samples, sampler: ScriptedSampler) -> None:
    sampler.holds = True
    for tenant, may_have in (("first", 4), ("second", 2), ("third", 1)):
        for number in range(may_have):
            samples.submit(request(f"{tenant}-{number}"), tenant)
        with pytest.raises(TooManySamples, match="as many of your samples as it takes"):
            samples.submit(request(f"{tenant}-more"), tenant)
    await settle()
    sampler.finish()
    await samples.wait("first-0", WAIT_SECONDS)
    samples.submit(request("later"), "first")


@pytest.mark.parametrize("limits", [QueueLimits(result_bytes=1000)])
async def test_a_tenant_with_many_results_loses_only_its_own_oldest(samples: Samples) -> None:
    samples.submit(request("small"), "small")
    assert isinstance(await samples.wait("small", WAIT_SECONDS), bytes)
    for number in range(100):
        samples.submit(request(f"flood-{number}"), "flood")
        await samples.wait(f"flood-{number}", WAIT_SECONDS)
    with pytest.raises(KeyError):
        await samples.wait("flood-0", 0)
    assert isinstance(await samples.wait("flood-99", 0), bytes)
    assert isinstance(await samples.wait("small", 0), bytes)


@pytest.mark.parametrize("limits", [QueueLimits(waiting_bytes=1000)])
async def test_samples_that_would_fill_the_memory_are_held_back_however_small_they_came(samples: Samples) -> None:
    sparse = wire_pb2.Tensor(sparse_csr=wire_pb2.SparseCsr(), dtype=wire_pb2.INT64, shape=[1000, 1000])
    large = [request(request_id) for request_id in ("a", "b", "c")]
    for one in large:
        one.target_prompt_logprobs.CopyFrom(sparse)
    samples.submit(large[0], TENANT)  # alone it may be larger
    with pytest.raises(TooManySamples):
        samples.submit(large[1], TENANT)
    with pytest.raises(TooManySamples):
        samples.submit(request("small"), TENANT)
    assert isinstance(await samples.wait("a", WAIT_SECONDS), Failure)  # its tensor lists no rows
    samples.submit(large[2], TENANT)


async def test_one_cancelled_while_its_adapter_is_loaded_is_never_drawn(
    samples: Samples, sampler: ScriptedSampler, tmp_path: Path
) -> None:
    samples.submit(request("a", saved_adapter(tmp_path)), TENANT)
    samples.cancel("a")
    outcome = await samples.wait("a", WAIT_SECONDS)
    assert outcome == Failure("user", "The request was cancelled.")
    assert (sampler.jobs, sampler.cancelled) == ([], ["a"])
    assert len(samples.adapters) == 1


async def test_a_draining_queue_refuses_new_samples_and_answers_its_old_ones(
    samples: Samples, sampler: ScriptedSampler
) -> None:
    sampler.holds = True
    samples.submit(request("a"), TENANT)
    samples.stop_taking()
    with pytest.raises(Draining, match="takes no more samples"):
        samples.submit(request("b"), TENANT)
    samples.submit(request("a"), TENANT)
    leaving = asyncio.create_task(samples.drained())
    await samples.wait("a", 0)
    sampler.finish()
    assert isinstance(await samples.wait("a", WAIT_SECONDS), bytes)
    await asyncio.wait_for(leaving, WAIT_SECONDS)
    assert isinstance(await samples.wait("a", 0), bytes)


async def test_an_unready_sampler_refuses_new_samples_with_its_reason_until_it_is_ready(
    samples: Samples, sampler: ScriptedSampler
) -> None:
    sampler.holds = True
    samples.submit(request("a"), TENANT)
    await until_held(sampler, 1)
    sampler.unready_reason = "vLLM does not answer"
    with pytest.raises(SamplerUnready, match=r"^vLLM does not answer$"):
        samples.submit(request("b"), TENANT)
    sampler.unready_reason = None
    samples.submit(request("b"), TENANT)
    await until_held(sampler, 2)
    sampler.finish()
    assert isinstance(await samples.wait("a", WAIT_SECONDS), bytes)


async def test_a_draining_sampler_does_not_wait_for_cancelled_samples(
    samples: Samples, sampler: ScriptedSampler
) -> None:
    samples.submit(request("done"), TENANT)
    await samples.wait("done", 0)
    samples.cancel("done")
    sampler.holds = True
    samples.submit(request("a"), TENANT)
    await samples.wait("a", 0)
    samples.cancel("a")
    samples.stop_taking()
    sampler.finish()
    await asyncio.wait_for(samples.drained(), WAIT_SECONDS)


async def test_samples_that_end_with_their_sampler_are_as_if_they_had_never_been(
    samples: Samples, sampler: ScriptedSampler
) -> None:
    """A client submits a sample again when it is not found, and gives up when it failed."""
    sampler.holds = True
    samples.submit(request("a"), TENANT)
    asked = asyncio.create_task(samples.wait("a", WAIT_SECONDS))
    await samples.wait("a", 0)
    sampler.finish(SampleOutcome(error=SamplerClosed("closed")))
    with pytest.raises(KeyError):
        await asked
    with pytest.raises(KeyError):
        await samples.wait("a", 0)
    assert samples.unfinished == 0
    await asyncio.wait_for(samples.drained(), WAIT_SECONDS)


ECHOED = replace(SEVEN, prompt_logprobs=np.array([np.nan, -1.0, -2.0], np.float32))


async def test_an_echo_is_assembled_outside_the_event_loop(samples: Samples, sampler: ScriptedSampler) -> None:
    sampler.holds, sampler.language = True, (letters := Letters())
    samples.submit(echo("a"), TENANT)
    await until_held(sampler, 1)
    sampler.finish(replace(ECHOED, topk_prompt_logprobs=TopkLogprobs.empty(3, 1)))
    assert isinstance(await samples.wait("a", WAIT_SECONDS), bytes)
    read = await samples.read("a", 0, 0)
    assert "".join(piece.content for piece in read.pieces) == "xxxx"
    assert letters.threads
    assert threading.get_ident() not in letters.threads


async def test_an_echo_without_a_waiter_was_counted(samples: Samples, sampler: ScriptedSampler) -> None:
    sampler.holds, sampler.language = True, Letters()
    samples.submit(echo("a"), TENANT)
    await until_held(sampler, 1)
    reading = asyncio.create_task(samples.read("a", 0, WAIT_SECONDS))
    await settle()
    (job,) = sampler.jobs
    assert job.drawn is not None
    job.drawn(0, DrawnToken(7, -0.5))
    read = await reading
    assert (read.tokens, read.pieces, read.result) == (1, (), None)
    samples.cancel("a")
    sampler.finish(SampleOutcome(error=UserError("The request was cancelled.")))
    await samples.wait("a", WAIT_SECONDS)
    assert (await samples.read("a", 0, 0)).tokens == 1


async def test_a_sample_that_cannot_be_read_as_text_fails_and_gives_its_place_back(
    samples: Samples, sampler: ScriptedSampler
) -> None:
    sampler.holds, sampler.language = True, (letters := Letters())
    letters.error = RuntimeError("no such token")
    samples.submit(echo("a"), TENANT)
    await until_held(sampler, 1)
    sampler.finish(ECHOED)
    failure = await samples.wait("a", WAIT_SECONDS)
    assert isinstance(failure, Failure)
    assert failure.category == "server"
    assert "could not be read as text (RuntimeError: no such token). Send it again" in failure.message
    assert samples.unfinished == 0
    samples.stop_taking()
    await asyncio.wait_for(samples.drained(), WAIT_SECONDS)


async def test_an_echo_with_too_many_texts_is_refused(samples: Samples, sampler: ScriptedSampler) -> None:
    sampler.language = Letters()
    most = echo("most", MOST_ECHOED_TEXTS // 8, 3)
    more = echo("more", MOST_ECHOED_TEXTS // 8 + 1, 3)
    alone = echo("text alone", MOST_ECHOED_TEXTS // 8 + 1, 3)
    alone.reading.logprobs = False
    for one in (most, more, alone):
        one.num_samples = 2
    sampler.holds = True
    for one in (most, more, alone):
        samples.submit(one, TENANT)
    await until_held(sampler, 2)
    assert await samples.wait("more", WAIT_SECONDS) == Failure(
        "user",
        "echo with logprobs asks for 131080 texts: 2 times a prompt of 16385 tokens, each with 3 of the likeliest; an "
        "answer has room for 131072. Ask for a smaller n or fewer logprobs, or shorten the prompt.",
    )
    assert sorted(job.request_id for job in sampler.jobs) == ["most", "text alone"]
    assert unpacked_bytes(most) - unpacked_bytes(alone) > MOST_ECHOED_TEXTS * 64


async def test_the_same_id_again_is_the_same_sample(samples: Samples, sampler: ScriptedSampler) -> None:
    for _ in range(3):
        samples.submit(request("a"), TENANT)
    assert isinstance(await samples.wait("a", WAIT_SECONDS), bytes)
    assert len(sampler.jobs) == 1
