"""A fault inside the loop fails the affected jobs and no others."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import pytest
from support.sampler.jobs import ask, ask_all, bits, job, prompt_of, random_adapter, submit
from tinsmith_trainer.errors import ServerError, UserError
from tinsmith_trainer.process.device_turns import Use
from tinsmith_trainer.sampling.builtin import BuiltinSampler, BuiltinSamplerSettings
from tinsmith_trainer.sampling.builtin import sampler as sampler_module
from tinsmith_trainer.sampling.builtin.batch import DecodeBatch
from tinsmith_trainer.sampling.builtin.loop import SamplingLoop
from tinsmith_trainer.sampling.builtin.prefill import Prefill
from tinsmith_trainer.torch_model.loading import TorchModel

SETTINGS = BuiltinSamplerSettings(deterministic=True, max_rows=4, prefill_block_tokens=16)


@pytest.fixture
def sampler(model: TorchModel) -> Iterator[BuiltinSampler]:
    sampler = BuiltinSampler(model, SETTINGS)
    yield sampler
    sampler.close()


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> Future[int]:
    """Return the exit code with which the process would have ended."""
    ended: Future[int] = Future()
    monkeypatch.setattr(os, "_exit", lambda code: None if ended.done() else ended.set_result(code))
    return ended


FAULT = RuntimeError("a made-up fault")
LOST_DEVICE = RuntimeError("CUDA error: an illegal memory access was encountered")
STEPS = pytest.mark.parametrize(
    ("owner", "method"),
    [(DecodeBatch, "step"), (Prefill, "run_block"), (Prefill, "__init__"), (SamplingLoop, "_advance")],
    ids=["a decode step", "a prompt block", "a prompt's start", "the loop itself"],
)


def fail_once(monkeypatch: pytest.MonkeyPatch, owner: type, method: str, fault: Exception = FAULT) -> None:
    """Make the next call of a method raise; later ones work."""
    working = getattr(owner, method)

    def failing(*args: object, **kwargs: object) -> object:
        monkeypatch.setattr(owner, method, working)
        raise fault

    monkeypatch.setattr(owner, method, failing)


@STEPS
def test_a_fault_fails_its_jobs_and_the_sampler_lives_on(
    sampler: BuiltinSampler, monkeypatch: pytest.MonkeyPatch, ended: Future[int], owner: type, method: str
) -> None:
    asked = job(prompt_of(20))
    before = ask(sampler, asked)
    fail_once(monkeypatch, owner, method)
    error = submit(sampler, job(prompt_of(30, seed=1))).get().error
    assert isinstance(error, ServerError)
    assert "a made-up fault" in str(error)
    assert bits(ask(sampler, asked)) == bits(before)
    assert sampler.stats().active == 0
    assert not ended.done()


@STEPS
def test_a_lost_device_ends_the_process_instead_of_failing_every_sample_at_once(
    sampler: BuiltinSampler, monkeypatch: pytest.MonkeyPatch, ended: Future[int], owner: type, method: str
) -> None:
    fail_once(monkeypatch, owner, method, LOST_DEVICE)
    submit(sampler, job(prompt_of(30)))
    assert ended.result(60) == 1


def test_a_device_lost_while_an_adapter_is_loaded_ends_the_process(
    sampler: BuiltinSampler, model: TorchModel, monkeypatch: pytest.MonkeyPatch, ended: Future[int]
) -> None:
    """Its samples never reach the loop."""

    def fail(*_: object) -> None:
        raise LOST_DEVICE

    monkeypatch.setattr(sampler_module, "load_adapter", fail)
    with pytest.raises(RuntimeError, match="CUDA error"):
        sampler.load_adapter("a", random_adapter(model))
    assert ended.result(0) == 1


def test_a_fault_in_a_prompt_spares_the_other_jobs(
    sampler: BuiltinSampler, model: TorchModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = [job(prompt_of(20, seed=n)) for n in range(3)]
    with model.shared_device.turns.held(Use.TRAINING):
        fail_once(monkeypatch, Prefill, "__init__")
        answers = [submit(sampler, asked) for asked in jobs]
    assert isinstance(answers[0].get().error, ServerError)
    assert [len(answer.get().sequences) for answer in answers[1:]] == [1, 1]


@pytest.mark.parametrize("prompt_logprobs", [False, True], ids=["sampled", "scored"])
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_a_diverged_adapter_fails_its_own_jobs_only(
    sampler: BuiltinSampler, model: TorchModel, poison: float, prompt_logprobs: bool
) -> None:
    healthy = random_adapter(model)
    name = next(name for name in healthy.tensors if "layers.0.self_attn.v_proj.lora_B" in name)
    diverged = replace(healthy, tensors=healthy.tensors | {name: np.full_like(healthy.tensors[name], poison)})
    sampler.load_adapter("healthy", healthy)
    sampler.load_adapter("diverged", diverged)
    asked = [job(prompt_of(20, seed=n), adapter="healthy", max_tokens=20 + n) for n in range(8)]
    alone = [bits(ask(sampler, each)) for each in asked]
    bad = [job(prompt_of(20), adapter="diverged", prompt_logprobs=prompt_logprobs) for _ in range(8)]
    outcomes = ask_all(sampler, [each for pair in zip(bad, asked, strict=True) for each in pair])
    for outcome in outcomes[::2]:
        assert isinstance(outcome.error, UserError)
        assert "adapter diverged are not finite" in str(outcome.error)
    assert [bits(outcome) for outcome in outcomes[1::2]] == alone
