"""recipes.decisions: one prefill says how likely each choice is, by the logprobs of tokens named in a sparse tensor."""

from __future__ import annotations

import asyncio
import math

import pytest
import tinker
from support.client.sdk import service_client
from support.recipes.names import LLAMA
from support.recipes.running import Runner

pytestmark = pytest.mark.timeout(700)

CHOICES = [("billing", "Invoices and prices"), ("sdk", "The package and its calls"), ("console", "Signing in")]


def test_choices_are_as_likely_as_the_prompts_that_hold_them(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    from tinker_cookbook import model_info, renderers
    from tinker_cookbook.recipes.decisions import Decision, DecisionRenderer, sample_decision
    from tinker_cookbook.tokenizer_utils import get_tokenizer

    monkeypatch.chdir(runner.hub)
    renderer = renderers.get_renderer(model_info.get_recommended_renderer_name(LLAMA), get_tokenizer(LLAMA))
    rendering = DecisionRenderer(renderer).render(Decision("Why was I charged twice?", CHOICES))
    with service_client(runner.server) as client:
        sampler = client.create_sampling_client(base_model=LLAMA).result()
        shares = asyncio.run(sample_decision(sampler, rendering))
        prompts = [tinker.ModelInput.from_ints(rendering.with_label(label)) for label in rendering.labels]
        scores = [sampler.compute_logprobs(prompt).result()[rendering.choice_pos] for prompt in prompts]
    assert list(shares) == ["billing", "sdk", "console"]
    weights = [math.exp(score or 0) for score in scores]
    assert [*shares.values()] == pytest.approx([weight / sum(weights) for weight in weights], abs=1e-4)
