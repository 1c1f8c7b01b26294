"""Steps that are launched before the one before them is read, as on a GPU; here on a CPU, by the same code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.sampler.jobs import bits, job, prompt_of, random_adapter, submit
from tinsmith_trainer.process.device_turns import Use
from tinsmith_trainer.sampling.base import SampleJob, SampleOutcome
from tinsmith_trainer.sampling.builtin import BuiltinSampler, BuiltinSamplerSettings, prefix_cache
from tinsmith_trainer.sampling.builtin.steps.launched import LaunchedStep
from tinsmith_trainer.torch_model.loading import TorchModel

SETTINGS = BuiltinSamplerSettings(max_rows=4, prefill_block_tokens=16, reads_behind=True)


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the launch and the reading of each step."""
    happened: list[str] = []
    launch, read = LaunchedStep.__init__, LaunchedStep.read

    def launched(self: LaunchedStep, *rest: Any) -> None:
        happened.append("launched")
        launch(self, *rest)

    def was_read(self: LaunchedStep) -> tuple[list[int], list[float]]:
        happened.append("read")
        return read(self)

    monkeypatch.setattr(LaunchedStep, "__init__", launched)
    monkeypatch.setattr(LaunchedStep, "read", was_read)
    return happened


def answers(model: TorchModel, settings: BuiltinSamplerSettings, jobs: Sequence[SampleJob]) -> list[SampleOutcome]:
    """Return the answers of jobs that are submitted before the first can run."""
    sampler = BuiltinSampler(model, settings)
    for seed in (1, 2):
        sampler.load_adapter(f"tuned {seed}", random_adapter(model, seed=seed))
    with model.shared_device.turns.held(Use.TRAINING):
        waiting = [submit(sampler, each) for each in jobs]
    outcomes = [answer.get() for answer in waiting]
    sampler.close()
    return outcomes


def company(stop: int) -> list[SampleJob]:
    """Return jobs of two tenants with more samples than rows, so that rows come, leave, move and are evicted."""
    asked = [
        job(prompt_of(10), max_tokens=30, num_samples=3),
        job(prompt_of(10), max_tokens=30, stop_tokens=(stop,)),
        job(prompt_of(13, seed=1), adapter="tuned 1", max_tokens=1, num_samples=2, topk_sample=3),
        job(prompt_of(5, seed=2), adapter="tuned 2", max_tokens=9, temperature=0.0, topk_sample=2),
        job(prompt_of(20, seed=3), adapter="tuned 1", max_tokens=12, top_k=5, seed=4),
    ]
    late = [job(prompt_of(8, seed=5), max_tokens=4, num_samples=2, top_p=0.9)]
    return [replace(each, tenant="many") for each in asked] + [replace(each, tenant="few") for each in late]


@pytest.fixture
def stop(model: TorchModel) -> int:
    """Return a token in the middle of a sample of `company`."""
    [outcome] = answers(model, SETTINGS, [job(prompt_of(10), max_tokens=30)])
    return int(outcome.sequences[0].tokens[6])


def test_a_step_is_launched_before_the_one_before_is_read(model: TorchModel, events: list[str]) -> None:
    answers(model, SETTINGS, [job(prompt_of(10), max_tokens=4)])
    assert events == ["launched", *["launched", "read"] * 3, "read"]


def test_a_stop_costs_one_token_that_is_not_returned(model: TorchModel, stop: int, events: list[str]) -> None:
    events.clear()
    [outcome] = answers(model, SETTINGS, [job(prompt_of(10), max_tokens=30, stop_tokens=(stop,))])
    [sequence] = outcome.sequences
    assert sequence.stopped
    assert sequence.tokens[-1] == stop
    assert events.count("launched") == len(sequence.tokens) + 1


def test_nothing_is_behind_on_a_cpu_unless_asked(model: TorchModel, events: list[str]) -> None:
    answers(model, replace(SETTINGS, reads_behind=None), [job(prompt_of(10), max_tokens=3)])
    assert events == ["launched", "read"] * 3


def test_reading_behind_changes_no_bit(model: TorchModel, stop: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tinsmith_trainer.sampling.builtin.batch.SMALLEST_EXTENT", 16)
    deterministic = replace(SETTINGS, deterministic=True)
    behind = answers(model, deterministic, company(stop))
    at_once = answers(model, replace(deterministic, reads_behind=False), company(stop))
    assert [bits(outcome) for outcome in behind] == [bits(outcome) for outcome in at_once]


def test_rows_that_move_take_their_unread_tokens_along(
    model: TorchModel, stop: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinsmith_trainer.sampling.builtin.batch.SMALLEST_EXTENT", 16)
    monkeypatch.setattr(prefix_cache, "LEAST_TOKENS", 9)
    monkeypatch.setattr(prefix_cache, "LEAST_SAMPLES", 2)
    behind = answers(model, SETTINGS, company(stop))
    at_once = answers(model, replace(SETTINGS, reads_behind=False), company(stop))
    for one, other in zip(behind, at_once, strict=True):
        for drawn, expected in zip(one.sequences, other.sequences, strict=True):
            assert drawn.tokens.tolist() == expected.tokens.tolist()
            np.testing.assert_allclose(drawn.logprobs, expected.logprobs, atol=1e-4)
