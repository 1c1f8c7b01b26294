"""Prompts that the rows of many samples share: the same samples, less to read and to keep."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.sampler.jobs import Answer, job, prompt_of, random_adapter, submit
from tinsmith_trainer.process.device_turns import Use
from tinsmith_trainer.sampling.base import SampleJob, SampleOutcome
from tinsmith_trainer.sampling.builtin import BuiltinSampler, BuiltinSamplerSettings
from tinsmith_trainer.sampling.builtin import prefix_cache as module
from tinsmith_trainer.sampling.builtin.batch import BatchKey, BatchPlan, DecodeBatch
from tinsmith_trainer.sampling.builtin.batches import Batches
from tinsmith_trainer.sampling.builtin.forward import ForwardPass, PrefixSpan
from tinsmith_trainer.sampling.builtin.kv_cache import SharedPrefix
from tinsmith_trainer.sampling.builtin.prefix_cache import SharedPrefixes
from tinsmith_trainer.torch_model.loading import TorchModel

SETTINGS = BuiltinSamplerSettings(max_rows=16, prefill_block_tokens=16, prefill_forward_tokens=64)
GROUP = module.LEAST_SAMPLES
TOKEN_BYTES = 2 * 2 * 2 * 16 * 4


@pytest.fixture(autouse=True)
def short_prompts_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LEAST_TOKENS", 20)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[int, int]]]:
    """Record the rows of each step that shared a prompt, as ranges."""
    spans: list[list[tuple[int, int]]] = []
    step = ForwardPass.step

    def watched(self: ForwardPass, *rest: Any, shared: Sequence[PrefixSpan] = (), **named: Any) -> torch.Tensor:
        spans.append([(span.start, span.end) for span in shared])
        return step(self, *rest, shared=shared, **named)

    monkeypatch.setattr(ForwardPass, "step", watched)
    return spans


def answers(
    model: TorchModel, jobs: Sequence[SampleJob], settings: BuiltinSamplerSettings = SETTINGS
) -> list[SampleOutcome]:
    """Return the answers of jobs that are submitted before the first can run."""
    sampler = BuiltinSampler(model, settings)
    sampler.load_adapter("tuned", random_adapter(model))
    assert sampler._loop._shares_prompts is not settings.deterministic
    with model.shared_device.turns.held(Use.TRAINING):
        waiting = [submit(sampler, each) for each in jobs]
    outcomes = [answer.get() for answer in waiting]
    assert sampler._loop._shared.nbytes == 0, "nothing is kept for samples that are done"
    sampler.close()
    return outcomes


def assert_alike(found: Sequence[SampleOutcome], expected: Sequence[SampleOutcome]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.error is None, one.error
        for drawn, plain in zip(one.sequences, other.sequences, strict=True):
            assert drawn.tokens.tolist() == plain.tokens.tolist()
            np.testing.assert_allclose(drawn.logprobs, plain.logprobs, atol=1e-4)


def unshared(model: TorchModel, monkeypatch: pytest.MonkeyPatch, jobs: Sequence[SampleJob]) -> list[SampleOutcome]:
    with monkeypatch.context() as patched:
        patched.setattr(module, "LEAST_TOKENS", 1 << 30)
        return answers(model, jobs)


def test_samples_of_a_shared_prompt_are_those_of_rows_by_themselves(
    model: TorchModel, monkeypatch: pytest.MonkeyPatch, steps: list[list[tuple[int, int]]]
) -> None:
    jobs = [
        job(prompt_of(40, seed=1), num_samples=GROUP, max_tokens=6),
        job(prompt_of(40, seed=1), adapter="tuned", num_samples=GROUP + 1, max_tokens=9, prompt_logprobs=True),
        job(prompt_of(30, seed=2), num_samples=2, max_tokens=7),
    ]
    shared = answers(model, jobs)
    assert any(len(spans) == 2 for spans in steps), "a step has several shared spans, and rows that share nothing"
    assert_alike(shared, unshared(model, monkeypatch, jobs))


def test_requests_for_one_sample_each_share_their_prompt(model: TorchModel, steps: list[list[tuple[int, int]]]) -> None:
    # The first sample is drawn from while the others come: it must be long enough for the last one to find it there.
    outcomes = answers(model, [job(prompt_of(60), seed=seed, max_tokens=16) for seed in range(GROUP)])
    assert [(0, GROUP)] in steps
    assert sorted(outcome.prompt_cache_hit_tokens for outcome in outcomes) == [0, *[59] * (GROUP - 1)]


def test_a_preempted_row_keeps_its_shared_blocks(model: TorchModel, monkeypatch: pytest.MonkeyPatch) -> None:
    few_rows = BuiltinSamplerSettings(max_rows=GROUP, prefill_block_tokens=16)
    jobs = [
        replace(job(prompt_of(40), num_samples=2 * GROUP, max_tokens=12), tenant="many"),
        replace(job(prompt_of(10), num_samples=2, max_tokens=5), tenant="few"),
    ]
    assert_alike(answers(model, jobs, few_rows), unshared(model, monkeypatch, jobs))


def test_in_deterministic_mode_no_prompt_is_shared(model: TorchModel, steps: list[list[tuple[int, int]]]) -> None:
    deterministic = BuiltinSamplerSettings(max_rows=4, prefill_block_tokens=16, deterministic=True)
    answers(model, [job(prompt_of(40), num_samples=GROUP, max_tokens=2)], deterministic)
    assert [(0, GROUP)] not in steps


def test_shared_prompts_are_within_the_memory_for_keys_and_values(
    model: TorchModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is memory for three more rows."""
    monkeypatch.setattr("tinsmith_trainer.sampling.builtin.batch.SMALLEST_EXTENT", 32)
    kept: list[int] = []
    keep = SharedPrefixes.keep

    def counted(self: SharedPrefixes, *rest: Any) -> SharedPrefix:
        prefix = keep(self, *rest)
        kept.append(self.nbytes // prefix.kv.nbytes)
        return prefix

    monkeypatch.setattr(SharedPrefixes, "keep", counted)
    memory = 4 * (4 * 32 * TOKEN_BYTES)  # a quarter holds four rows
    small = BuiltinSamplerSettings(max_rows=4, prefill_block_tokens=16, kv_cache_bytes=memory)
    jobs = [job(prompt_of(100, seed=seed), num_samples=GROUP, max_tokens=3) for seed in range(5)]
    assert all(outcome.error is None for outcome in answers(model, jobs, small))
    assert kept
    assert max(kept) <= 3


def test_a_prompt_that_others_join_while_it_is_computed_is_kept_only_where_there_is_room(
    model: TorchModel, monkeypatch: pytest.MonkeyPatch, steps: list[list[tuple[int, int]]]
) -> None:
    """Its computation takes two forwards."""
    prompt = prompt_of(100)
    sampler = BuiltinSampler(model, SETTINGS)
    others: list[Answer] = []
    prompts = ForwardPass.prompts

    def joined(self: ForwardPass, *rest: Any) -> None:
        if not others:
            others.extend(submit(sampler, job(prompt, seed=seed, max_tokens=3)) for seed in range(2, GROUP + 1))
        prompts(self, *rest)

    assert sampler._loop._shares_prompts
    steps.clear()
    monkeypatch.setattr(ForwardPass, "prompts", joined)
    monkeypatch.setattr(Batches, "has_room_for_shared", lambda self, nbytes: False)
    assert submit(sampler, job(prompt, max_tokens=3)).get().error is None
    assert [other.get().error for other in others] == [None] * (GROUP - 1)
    sampler.close()
    assert not any(steps)


def test_a_tenant_does_not_wait_for_the_end_of_anothers_shared_prompt(
    model: TorchModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shared prompt takes most of the memory, and its samples take all rows."""
    monkeypatch.setattr("tinsmith_trainer.sampling.builtin.batch.SMALLEST_EXTENT", 32)
    memory = 4 * (4 * 32 * TOKEN_BYTES)
    sampler = BuiltinSampler(model, BuiltinSamplerSettings(max_rows=4, prefill_block_tokens=16, kv_cache_bytes=memory))
    ended: list[str] = []
    done = threading.Semaphore(0)

    def ask(new_job: SampleJob) -> None:
        def note(outcome: SampleOutcome) -> None:
            ended.append(new_job.tenant if outcome.error is None else str(outcome.error))
            done.release()

        sampler.submit(new_job, note)

    step, begun = ForwardPass.step, itertools.count()

    def followed(self: ForwardPass, *rest: Any, **named: Any) -> torch.Tensor:
        if next(begun) == 1:
            ask(replace(job(prompt_of(30, seed=1), num_samples=4, max_tokens=1), tenant="later"))
        return step(self, *rest, **named)

    assert sampler._loop._shares_prompts
    monkeypatch.setattr(ForwardPass, "step", followed)
    ask(replace(job(prompt_of(400), num_samples=4, max_tokens=28), tenant="first"))
    assert all(done.acquire(timeout=60) for _ in range(2))
    sampler.close()
    assert ended == ["later", "first"]


def test_the_cost_of_a_step_includes_the_shared_prompts_that_it_reads(
    model: TorchModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = ForwardPass(model)
    plan = BatchPlan(forward.geometry, SETTINGS, 512)
    batch = DecodeBatch(BatchKey(256), plan, forward)
    one, other = (SharedPrefix(torch.zeros(0), 300, serial) for serial in (1, 2))

    def cost(*prefixes: SharedPrefix) -> float:
        rows = [SimpleNamespace(prefix=prefix, own_position=1) for prefix in prefixes]
        monkeypatch.setattr(DecodeBatch, "samples", property(lambda self: rows))
        return batch.cost(len(rows))

    assert cost(one, other) > cost(one, one)


def test_a_lack_of_memory_says_nothing_of_the_model(model: TorchModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(self: ForwardPass) -> bool:
        raise MemoryError("a made-up lack of memory")

    monkeypatch.setattr(ForwardPass, "_comes_out_alike", lacking)
    with pytest.raises(MemoryError):
        BuiltinSampler(model, SETTINGS)
