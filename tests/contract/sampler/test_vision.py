"""Prompts with images: the built-in sampler draws what plain transformers computes of the processor's inputs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support.engine.places import model_on
from support.sampler.jobs import SMALL_SETTINGS, ask, ask_all, job, prompt_of, random_adapter, submit
from support.tiny_models import tiny_model
from support.tiny_vision import (
    ALIKE,
    VISION_FAMILIES,
    VisionFamily,
    encoded,
    image_at,
    picture,
    plain_inputs,
    plain_vision_model,
    split_tokens,
    vision_directory,
    vision_model,
)
from tinsmith_trainer.errors import UserError
from tinsmith_trainer.sampling.base import SampleJob, Sampler
from tinsmith_trainer.sampling.builtin import BuiltinSampler, BuiltinSamplerSettings
from tinsmith_trainer.sampling.builtin.forward import ForwardPass
from tinsmith_trainer.torch_model.base_model import Image
from tinsmith_trainer.torch_model.lora import Route
from torch.nn.functional import log_softmax

from .conftest import IN_PLACE_OF_A_GPU, PLACES, path_of

PROMPT = "What is {} and what is {}? Noise:"
FILES = (encoded(picture()), encoded(picture(56, 96, seed=1), "jpeg"))
TOLERANCE = 1e-4


@pytest.fixture(params=["deterministic", "fast", *IN_PLACE_OF_A_GPU])
def sampler(request: pytest.FixtureRequest, family: VisionFamily) -> Iterator[Sampler]:
    settings = BuiltinSamplerSettings(deterministic=request.param == "deterministic", **SMALL_SETTINGS)
    place, _ = PLACES.get(request.param, ("cpu", None))
    with path_of(place):
        sampler = BuiltinSampler(model_on(place, vision_directory(family)), settings)
        yield sampler
        sampler.close()


def job_of(family: VisionFamily, *files: bytes, **options: Any) -> SampleJob:
    ids = plain_inputs(family, PROMPT, *files)["input_ids"][0].numpy()
    tokens, images = split_tokens(ids, *files)
    return replace(job(tokens, **options), images=images)


@torch.no_grad()
def plain_logprobs(model: Any, inputs: Any, sampled: np.ndarray) -> np.ndarray:
    """Return the logprob of every token after the first, by one forward of the prompt and the sample."""
    grown = dict(inputs)
    for name in ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"):
        if name in grown:
            fill = {"input_ids": torch.from_numpy(sampled.astype(np.int64)), "attention_mask": torch.ones(len(sampled))}
            more = fill.get(name, torch.zeros(len(sampled))).to(grown[name].dtype)
            grown[name] = torch.cat([grown[name], more[None]], 1)
    logits = model(**grown).logits[0].float()
    found = log_softmax(logits[:-1], -1).gather(-1, grown["input_ids"][0, 1:, None])
    return found[:, 0].numpy()


@pytest.mark.parametrize("family", [*VISION_FAMILIES, *ALIKE])
def test_logprobs_of_prompt_and_sample_are_those_of_one_plain_forward(sampler: Sampler, family: VisionFamily) -> None:
    state = random_adapter(vision_model(family), rank=4)
    sampler.load_adapter("tuned", state)
    asked = job_of(family, *FILES, adapter="tuned", prompt_logprobs=True, max_tokens=12, temperature=0.7)

    scored, unscored = ask_all(sampler, [asked, replace(asked, request_id="unscored", prompt_logprobs=False)])

    inputs = plain_inputs(family, PROMPT, *FILES)
    expected = plain_logprobs(plain_vision_model(family, state), inputs, scored.sequences[0].tokens)
    found = [*scored.prompt_logprobs[1:], *scored.sequences[0].logprobs]
    np.testing.assert_allclose(found, expected, atol=TOLERANCE)
    np.testing.assert_allclose(unscored.sequences[0].logprobs, expected[-12:], atol=TOLERANCE)


@pytest.mark.parametrize("family", ["qwen3-vl"])
def test_a_scored_prompt_holds_logits_of_a_block_at_a_time(
    sampler: Sampler, family: VisionFamily, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[int] = []
    project = ForwardPass.project

    def counting(self: ForwardPass, hidden: torch.Tensor, route: Route) -> torch.Tensor:
        rows.append(len(hidden))
        return project(self, hidden, route)

    monkeypatch.setattr(ForwardPass, "project", counting)
    scored = ask(sampler, job_of(family, *FILES, prompt_logprobs=True, max_tokens=1))
    assert sum(rows) == len(scored.prompt_logprobs) - 1
    assert max(rows) == SMALL_SETTINGS["prefill_block_tokens"]


@pytest.mark.parametrize("family", ["qwen3-vl"])
def test_prompts_of_equal_tokens_with_other_images_share_nothing(sampler: Sampler, family: VisionFamily) -> None:
    files = [(encoded(picture(seed=seed)), encoded(picture(seed=seed + 1))) for seed in (0, 2, 0)]
    jobs = [job_of(family, *pair, max_tokens=4, temperature=0.0) for pair in files]
    text = job(prompt_of(90, vocab_size=300), max_tokens=4, temperature=0.0)

    one, other, again, text_only = ask_all(sampler, [*jobs, text])

    assert one.prompt_cache_hit_tokens == again.prompt_cache_hit_tokens == 0
    np.testing.assert_allclose(one.sequences[0].logprobs, again.sequences[0].logprobs, atol=TOLERANCE)
    assert not np.allclose(one.sequences[0].logprobs, other.sequences[0].logprobs, atol=1e-3)
    alone = ask(sampler, replace(text, request_id="alone")).sequences[0]
    np.testing.assert_allclose(text_only.sequences[0].logprobs, alone.logprobs, atol=TOLERANCE)


@pytest.mark.parametrize("family", ["qwen3-vl"])
@pytest.mark.parametrize(
    ("images", "sentence"),
    [
        ((image_at(6),), "ends with an image"),
        ((Image(1, b"", "png"),), "The prompt, image 0 is not a readable png"),
        ((Image(1, FILES[0][:-300], "png"),), "The prompt, image 0 cannot be decoded"),
    ],
    ids=["last", "empty", "cut off"],
)
def test_an_invalid_prompt_is_refused_with_a_message(
    sampler: Sampler, images: tuple[Image, ...], sentence: str
) -> None:
    outcome = submit(sampler, replace(job(prompt_of(6, vocab_size=300)), images=images)).get()
    assert isinstance(outcome.error, UserError)
    assert sentence in str(outcome.error)


def test_a_model_of_text_refuses_images() -> None:
    sampler = BuiltinSampler(tiny_model(), BuiltinSamplerSettings(**SMALL_SETTINGS))
    outcome = submit(sampler, replace(job(prompt_of(6)), images=(image_at(1),))).get()
    sampler.close()
    assert "takes text alone on this server" in str(outcome.error)
    assert not sampler.takes_images
