"""Prompts that share a forward. What they come to is in the contract of samplers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from support.sampler.jobs import job, prompt_of, random_adapter, submit
from tinsmith_trainer.process.device_turns import Use
from tinsmith_trainer.sampling.base import SampleJob, SampleOutcome
from tinsmith_trainer.sampling.builtin import BuiltinSampler, BuiltinSamplerSettings
from tinsmith_trainer.sampling.builtin.forward import ForwardPass
from tinsmith_trainer.sampling.builtin.kv_cache import PromptPart
from tinsmith_trainer.torch_model.loading import TorchModel

SETTINGS = BuiltinSamplerSettings(max_rows=8, prefill_block_tokens=16, prefill_forward_tokens=64)


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Record the lengths of each prompt forward."""
    lengths: list[list[int]] = []
    compute = ForwardPass.prompts

    def counted(self: ForwardPass, parts: Sequence[PromptPart], *rest: object) -> None:
        lengths.append([part.length for part in parts])
        compute(self, parts, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(ForwardPass, "prompts", counted)
    return lengths


def answers(model: TorchModel, *jobs: SampleJob) -> list[SampleOutcome]:
    """Return the answers of jobs that are submitted before the first can run."""
    sampler = BuiltinSampler(model, SETTINGS)
    sampler.load_adapter("tuned", random_adapter(model))
    with model.shared_device.turns.held(Use.TRAINING):
        waiting = [submit(sampler, each) for each in jobs]
    outcomes = [answer.get() for answer in waiting]
    sampler.close()
    return outcomes


def of_length(length: int, seed: int = 0, adapter: str = "") -> SampleJob:
    """Return a job whose prompt has this many tokens to compute."""
    return job(prompt_of(length + 1, seed=seed), adapter=adapter, max_tokens=2)


def test_a_prompt_that_would_be_mostly_padding_waits(model: TorchModel, forwards: list[list[int]]) -> None:
    answers(model, of_length(30), of_length(5, seed=1))
    assert forwards == [[30], [5]]


def test_a_long_prompts_end_takes_few_short_ones_along(model: TorchModel, forwards: list[list[int]]) -> None:
    """Each would attend to as many tokens as it does."""
    answers(model, of_length(138), *(of_length(10, seed) for seed in range(1, 6)))
    assert forwards == [[64], [64], [10, 10], [10, 10, 10, 10]]


def test_a_prompt_that_begins_like_one_in_the_forward_finds_it_known(
    model: TorchModel, forwards: list[list[int]]
) -> None:
    first, second = answers(model, of_length(20), of_length(20))
    assert forwards == [[20]]
    assert [first.prompt_cache_hit_tokens, second.prompt_cache_hit_tokens] == [0, 20]
    np.testing.assert_array_equal(first.sequences[0].tokens, second.sequences[0].tokens)
