"""Models beyond the plain ones: sliding windows, mixed layers, bfloat16; and those that are refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.sampler.jobs import ask, ask_all, bits, full_logprobs, job, plain_model, prompt_of, random_adapter
from tinsmith_trainer.errors import ServerError
from tinsmith_trainer.sampling.builtin import BuiltinSampler, BuiltinSamplerSettings
from tinsmith_trainer.torch_model.loading import TorchModel, load_torch_model
from transformers import MistralConfig, Qwen2Config, Qwen3Config
from transformers.models.mistral import MistralForCausalLM
from transformers.models.qwen2 import Qwen2ForCausalLM
from transformers.models.qwen3 import Qwen3ForCausalLM

SIZES = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "eos_token_id": 5,
    "bos_token_id": None,
}
LAYERS = ["full_attention", "sliding_attention", "full_attention"]
ARCHITECTURES: dict[str, Callable[[], Any]] = {
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
    "mistral with a window": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=24)),
    "qwen3 with mixed layers": lambda: Qwen3ForCausalLM(
        Qwen3Config(**SIZES, use_sliding_window=True, sliding_window=24, layer_types=LAYERS)
    ),
}
SETTINGS = BuiltinSamplerSettings(deterministic=True, max_rows=4, prefill_block_tokens=16)


@pytest.fixture
def directory_of(tmp_path: Path, tiny_directory: Path) -> Callable[[Any], str]:
    """Saves a model beside the tiny tokenizer."""

    def save(made: Any) -> str:
        for file in tiny_directory.glob("*token*"):
            shutil.copy(file, tmp_path)
        made.save_pretrained(tmp_path)
        return str(tmp_path)

    return save


@pytest.mark.parametrize("architecture", list(ARCHITECTURES))
def test_an_architecture_gives_its_own_logprobs(directory_of: Callable[[Any], str], architecture: str) -> None:
    torch.manual_seed(0)
    model = load_torch_model(directory_of(ARCHITECTURES[architecture]()))
    sampler = BuiltinSampler(model, SETTINGS)
    outcome = ask(sampler, job(prompt_of(60), max_tokens=30, prompt_logprobs=True))
    sampler.close()
    found = [*outcome.prompt_logprobs[1:], *outcome.sequences[0].logprobs]
    expected = full_logprobs(plain_model(model), [*prompt_of(60), *outcome.sequences[0].tokens])
    np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.fixture
def without_onednn() -> Iterator[None]:
    """Some virtual machines announce AMX and forbid it; oneDNN's bfloat16 kernels kill the process there."""
    with torch.backends.mkldnn.flags(enabled=False):
        yield


@pytest.mark.usefixtures("without_onednn")
@pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN")  # said by the switch itself
def test_a_bfloat16_base_keeps_its_promises(tiny_directory: Path) -> None:
    model = load_torch_model(str(tiny_directory), dtype=torch.bfloat16)
    sampler = BuiltinSampler(model, SETTINGS)
    sampler.load_adapter("tuned", random_adapter(model))
    jobs = [job(prompt_of(30, seed=n), adapter=["", "tuned"][n % 2], max_tokens=20) for n in range(6)]
    together = ask_all(sampler, jobs)
    assert [bits(outcome) for outcome in together] == [bits(ask(sampler, each)) for each in jobs]
    base = together[0].sequences[0]
    sampler.close()
    expected = full_logprobs(plain_model(model), [*jobs[0].prompt, *base.tokens])[29:]
    np.testing.assert_allclose(base.logprobs, expected, atol=0.1)


def test_angles_that_follow_from_a_length_are_refused_at_once(
    tiny_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_torch_model(str(tiny_directory))
    by_length = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    monkeypatch.setattr(model.model.config, "rope_parameters", by_length)
    with pytest.raises(ServerError, match="of type dynamic"):
        BuiltinSampler(model, SETTINGS)


def test_logits_of_a_long_prompt_are_never_held_at_once(model: TorchModel, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    sampler = BuiltinSampler(model, SETTINGS)
    hook = model.layers["lm_head"].register_forward_hook(lambda layer, inputs, output: rows.append(output.shape[1]))
    ask(sampler, job(prompt_of(500), max_tokens=1, prompt_logprobs=True))
    sampler.close()
    hook.remove()
    assert max(rows) == 16
