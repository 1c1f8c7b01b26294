"""Real servers of vLLM and SGLang, as the child that a sampler makes of one; vLLM's on a CPU, too."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.engine.contract import require_gpus, require_package
from support.sampler.jobs import all_logprobs, ask, ask_all, full_logprobs, job, plain_model, prompt_of, random_adapter
from support.tiny_models import tiny_model
from support.token_server.real_vllm import SHAPE
from support.token_server.shared import SharedServer
from tinsmith_trainer.options import parse_options
from tinsmith_trainer.sampling.base import Sampler
from tinsmith_trainer.torch_model.loading import TorchModel
from tinsmith_trainer.worker.startup import load_sampler

# Kernels are compiled and servers start within a test; libraries warn about hardware that is not known here.
pytestmark = [pytest.mark.timeout(1800), pytest.mark.filterwarnings("default")]

ON_A_CPU = "vllm on a cpu"
ATOL = 0.1
PROMPT = prompt_of(24)


@pytest.fixture(scope="module")
def model() -> TorchModel:
    """Return the model on the CPU in float32, for comparison."""
    return tiny_model(shape=SHAPE)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(["vllm"], id="vllm", marks=pytest.mark.gpu),
        pytest.param(
            ["sglang", "--server-argument=--enable-deterministic-inference"], id="sglang", marks=pytest.mark.gpu
        ),
        pytest.param([ON_A_CPU], id=ON_A_CPU, marks=pytest.mark.vllm),
    ],
)
def sampler(
    request: pytest.FixtureRequest, model: TorchModel, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Sampler]:
    package, *arguments = request.param
    if package == ON_A_CPU:
        shared: SharedServer = request.getfixturevalue("real_vllm")
        sampler: Sampler = shared.sampler()
        yield sampler
        sampler.close()
        return
    require_gpus()
    require_package(package, "docs/how-to/gpu-samplers.md says which image has it.")
    scratch: Path = tmp_path_factory.mktemp("scratch")
    flags = ["--role", "sampler", "--engine", package, *arguments, "--scratch", str(scratch), "--max-rank", "8"]
    needed = ["--model", model.info.path, "--socket", "none", "--checkpoint-root", "file:///none"]
    _, sampler = load_sampler(parse_options([*needed, *flags]))
    yield sampler
    sampler.close()


def test_logprobs_of_samples_are_those_of_the_model(sampler: Sampler, model: TorchModel) -> None:
    (sequence,) = ask(sampler, job(PROMPT, max_tokens=16)).sequences
    expected = full_logprobs(plain_model(model), [*PROMPT, *sequence.tokens])[len(PROMPT) - 1 :]
    assert len(sequence.tokens) == 16
    np.testing.assert_allclose(sequence.logprobs, expected, atol=ATOL)


def test_prompt_logprobs_are_those_of_the_model(sampler: Sampler, model: TorchModel) -> None:
    scores = ask(sampler, job(PROMPT, max_tokens=1, prompt_logprobs=True)).prompt_logprobs
    assert scores is not None
    np.testing.assert_allclose(scores[1:], full_logprobs(plain_model(model), PROMPT), atol=ATOL)


def test_an_adapter_is_loaded_during_operation_and_changes_the_samples(sampler: Sampler, model: TorchModel) -> None:
    adapter = random_adapter(model, families=("attn", "mlp"))
    sampler.load_adapter("version-1", adapter)
    (sequence,) = ask(sampler, job(PROMPT, adapter="version-1", max_tokens=16)).sequences
    tokens = [*PROMPT, *sequence.tokens]
    np.testing.assert_allclose(
        sequence.logprobs, full_logprobs(plain_model(model, adapter), tokens)[len(PROMPT) - 1 :], atol=ATOL
    )
    assert np.abs(full_logprobs(plain_model(model), tokens)[len(PROMPT) - 1 :] - sequence.logprobs).max() > 2 * ATOL


def test_a_seed_draws_the_same_tokens_again(sampler: Sampler) -> None:
    one, other = (ask(sampler, job(PROMPT, max_tokens=16, seed=7)).sequences[0].tokens.tolist() for _ in range(2))
    assert one == other


def test_the_likeliest_tokens_are_those_of_the_model(sampler: Sampler, model: TorchModel) -> None:
    outcome = ask(sampler, job(PROMPT, max_tokens=4, temperature=0.5, topk_prompt=5, topk_sample=3))
    (sequence,) = outcome.sequences
    expected = -np.sort(-all_logprobs(plain_model(model), [*PROMPT, *sequence.tokens]), axis=1)
    assert outcome.topk_prompt_logprobs is not None
    assert sequence.topk_logprobs is not None
    np.testing.assert_allclose(outcome.topk_prompt_logprobs.logprobs[1:], expected[: len(PROMPT) - 1, :5], atol=ATOL)
    np.testing.assert_allclose(sequence.topk_logprobs.logprobs, expected[len(PROMPT) - 1 :, :3], atol=ATOL)


def test_named_tokens_have_the_logprobs_of_the_model_in_any_batch(sampler: Sampler, model: TorchModel) -> None:
    targets = np.random.default_rng(1).integers(0, 512, (len(PROMPT) - 1, 3))
    asked = job(PROMPT, max_tokens=1, targets=targets)
    company = [job(PROMPT, max_tokens=64, topk_sample=4), job(PROMPT, max_tokens=64, prompt_logprobs=True)]
    found, *others = ask_all(sampler, [asked, *company])
    assert found.target_prompt_logprobs is not None
    expected = np.take_along_axis(all_logprobs(plain_model(model), PROMPT), targets, axis=1)
    np.testing.assert_allclose(found.target_prompt_logprobs, expected, atol=ATOL)
    assert [len(outcome.sequences[0].tokens) for outcome in others] == [64, 64]


def test_alternatives_to_a_prompt_have_the_logprobs_of_the_model(sampler: Sampler, model: TorchModel) -> None:
    drawn = ask(sampler, job(PROMPT, max_tokens=1, temperature=2.0, alt_tokens=2)).prompt_alt_tokens
    assert drawn is not None
    expected = np.take_along_axis(all_logprobs(plain_model(model), PROMPT), drawn.tokens, axis=1)
    np.testing.assert_allclose(drawn.logprobs, expected, atol=ATOL)


def test_a_sequence_fills_the_context_to_its_last_token(sampler: Sampler) -> None:
    """Servers keep back some of it."""
    (sequence,) = ask(sampler, job(prompt_of(SHAPE.max_sequence_length - 5), max_tokens=None)).sequences
    assert len(sequence.tokens) == 5
