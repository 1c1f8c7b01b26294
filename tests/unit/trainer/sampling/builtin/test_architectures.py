"""Models beyond the plain ones: sliding windows, mixed layers, bfloat16; and those that are refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.engine.contract import forward, spec
from support.engine.datums import sft_datum
from support.sampler.jobs import (
    ask,
    ask_all,
    bits,
    full_logprobs,
    job,
    plain_model,
    prompt_of,
    random_adapter,
)
from tinsmith_trainer.engines.peft import build_peft_engine
from tinsmith_trainer.errors import ModelDirectoryInvalid, ServerError
from tinsmith_trainer.sampling.builtin import BuiltinSampler, BuiltinSamplerSettings
from tinsmith_trainer.torch_model.loading import TorchModel, load_torch_model
from transformers import LlamaConfig, MistralConfig, Phi3Config, Qwen2Config, Qwen3Config
from transformers.models.llama import LlamaForCausalLM
from transformers.models.mistral import MistralForCausalLM
from transformers.models.phi3 import Phi3ForCausalLM
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
    """Save a model together with the tiny tokenizer."""

    def save(saved_model: Any) -> str:
        for file in tiny_directory.glob("*token*"):
            shutil.copy(file, tmp_path)
        saved_model.save_pretrained(tmp_path)
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
    """Disable oneDNN: some virtual machines announce AMX and forbid it, and its bfloat16 kernels crash there."""
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


ORIGINAL = 96
LONG = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "original_max_position_embeddings": ORIGINAL}
BY_LENGTH: dict[str, tuple[int, Callable[[], Any]]] = {
    "phi3": (
        ORIGINAL,
        lambda: Phi3ForCausalLM(
            Phi3Config(
                **(SIZES | {"original_max_position_embeddings": ORIGINAL, "pad_token_id": 0}),
                rope_parameters={"rope_type": "longrope", "rope_theta": 1e4, **LONG},
            )
        ),
    ),
    "llama": (
        ORIGINAL,
        lambda: LlamaForCausalLM(
            LlamaConfig(**SIZES, rope_parameters={"rope_type": "longrope", "rope_theta": 1e4, "factor": 5.3, **LONG})
        ),
    ),
    "dynamic": (
        512,
        lambda: Qwen3ForCausalLM(
            Qwen3Config(**SIZES, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4})
        ),
    ),
}


@pytest.mark.parametrize("kind", list(BY_LENGTH))
def test_angles_that_change_with_a_length_are_right_up_to_it_and_refused_beyond(
    directory_of: Callable[[Any], str], kind: str
) -> None:
    fixed, new_model = BY_LENGTH[kind]
    torch.manual_seed(0)
    model = load_torch_model(directory_of(new_model()))

    longer = replace(model, info=replace(model.info, max_sequence_length=fixed + 1))
    with pytest.raises(ServerError, match=f"behind {fixed} tokens. Set the maximum sequence length to {fixed} or "):
        BuiltinSampler(longer, SETTINGS)

    sampler = BuiltinSampler(replace(model, info=replace(model.info, max_sequence_length=fixed)), SETTINGS)
    # A longer sequence of the trainer's leaves no trace in the sampler's angles.
    full_logprobs(model.model, prompt_of(ORIGINAL + 9))
    outcome = ask(sampler, job(prompt_of(fixed - 8), max_tokens=30, prompt_logprobs=True))
    sampler.close()
    assert len(outcome.sequences[0].tokens) == 8
    found = [*outcome.prompt_logprobs[1:], *outcome.sequences[0].logprobs]
    expected = full_logprobs(plain_model(model), [*prompt_of(fixed - 8), *outcome.sequences[0].tokens])
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_a_row_is_trained_with_the_angles_of_its_own_length_in_any_batch(
    directory_of: Callable[[Any], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are padded: one just below the length behind which angles change must not be padded beyond it."""
    monkeypatch.setitem(LONG, "original_max_position_embeddings", behind := 83)
    torch.manual_seed(0)
    model = load_torch_model(
        directory_of(
            LlamaForCausalLM(
                LlamaConfig(
                    **SIZES, rope_parameters={"rope_type": "longrope", "rope_theta": 1e4, "factor": 5.3, **LONG}
                )
            )
        )
    )
    engine = build_peft_engine(model)
    engine.create_adapter("a", spec(engine))
    datums = [sft_datum(length, seed=length) for length in (behind - 1, behind, behind + 1, 20)]
    plain = plain_model(model)
    for datum, output in zip(datums, forward(engine, datums).outputs, strict=True):
        with torch.no_grad():
            logits = plain(input_ids=torch.tensor(datum.tokens.astype(np.int64))[None]).logits[0]
        alone = torch.log_softmax(logits, -1).numpy()[np.arange(datum.length), datum.loss_inputs["target_tokens"]]
        np.testing.assert_allclose(output["logprobs"], alone, atol=1e-4)


@pytest.mark.parametrize(
    ("weight", "message"), [("lm_head", "lm_head"), ("model.norm", "model.norm"), (None, "float16")]
)
def test_a_model_that_is_not_finite_is_not_blamed_on_its_architecture(
    directory_of: Callable[[Any], str], weight: str | None, message: str
) -> None:
    torch.manual_seed(0)
    saved_model = ARCHITECTURES["qwen2"]()
    with torch.no_grad():
        if weight is None:
            saved_model.lm_head.weight.mul_(1e7)
        else:
            saved_model.get_submodule(weight).weight[-1] = torch.nan
    model = load_torch_model(directory_of(saved_model), dtype=torch.float32 if weight else torch.float16)
    if weight is None:
        model.model.get_parameter("lm_head.weight").data.fill_(6e4)
    for build in (lambda: BuiltinSampler(model, SETTINGS), lambda: build_peft_engine(model)):
        with pytest.raises(ModelDirectoryInvalid, match="numbers that are not finite") as refused:
            build()
        assert message in str(refused.value)


def test_logits_of_a_long_prompt_are_never_held_at_once(model: TorchModel, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    sampler = BuiltinSampler(model, SETTINGS)
    hook = model.layers["lm_head"].register_forward_hook(lambda layer, inputs, output: rows.append(output.shape[1]))
    ask(sampler, job(prompt_of(500), max_tokens=1, prompt_logprobs=True))
    sampler.close()
    hook.remove()
    assert max(rows) == 16
