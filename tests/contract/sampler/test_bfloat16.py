"""Logprobs in bfloat16, the default dtype on a GPU: those of plain transformers within rounding."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.sampler.jobs import ask_all, full_logprobs, job, plain_model, prompt_of, random_adapter
from tinsmith_trainer.engines.base import AdapterState
from tinsmith_trainer.sampling.base import Sampler
from tinsmith_trainer.torch_model.loading import TorchModel

from .conftest import IN_BFLOAT16

pytestmark = pytest.mark.parametrize("sampler", IN_BFLOAT16, indirect=True)

TOLERANCE = 2e-2
"""Twice the largest difference measured on a CPU."""


def small_adapter(model: TorchModel, seed: int) -> AdapterState:
    """Return an adapter that changes logprobs by more than the tolerance but does not amplify rounding errors."""
    state = random_adapter(model, seed=seed, rank=4 + seed)
    return replace(state, tensors={name: values * 0.3 for name, values in state.tensors.items()})


def test_logprobs_of_prompts_and_samples_of_several_adapters_are_the_models(
    sampler: Sampler, model: TorchModel
) -> None:
    states = {f"adapter-{n}": small_adapter(model, n) for n in range(3)}
    for key, state in states.items():
        sampler.load_adapter(key, state)
    keys = ["", *states, *states, ""]
    jobs = [job(prompt_of(240, seed=n), adapter=key, max_tokens=40, prompt_logprobs=True) for n, key in enumerate(keys)]
    for asked, outcome in zip(jobs, ask_all(sampler, jobs), strict=True):
        plain = plain_model(model, states.get(asked.adapter_key))
        found = [*outcome.prompt_logprobs[1:], *outcome.sequences[0].logprobs]
        expected = full_logprobs(plain, [*asked.prompt, *outcome.sequences[0].tokens])
        np.testing.assert_allclose(found, expected, atol=TOLERANCE)
