"""Architectures that scale or cap their logits, compared with plain PEFT and with the sampler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.temporary_files import folder_of_whole_run
from support.tiny_models import tiny_directory
from tinsmith.cli import main
from tinsmith_trainer.engines.peft.shared_forward import check_architecture
from tinsmith_trainer.errors import ModelDirectoryInvalid
from tinsmith_trainer.torch_model.architecture import LogitTransform
from tinsmith_trainer.torch_model.loading import load_torch_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

# Caps so low, and weights so large, that leaving them out shows.
CASES: dict[str, tuple[dict[str, Any], LogitTransform]] = {
    "cohere": ({"logit_scale": 0.25}, LogitTransform(0.25)),
    "cohere2": ({"logit_scale": 0.25}, LogitTransform(0.25)),
    "gemma2": ({"final_logit_softcapping": 3.0}, LogitTransform(cap=3.0)),
    "gemma3_text": ({"final_logit_softcapping": 3.0}, LogitTransform(cap=3.0)),
    "granite": ({"logits_scaling": 8.0}, LogitTransform(0.125)),
    "granitemoe": ({"logits_scaling": 8.0, "num_local_experts": 4, "num_experts_per_tok": 2}, LogitTransform(0.125)),
}


def model_directory(model_type: str) -> Path:
    tokenizer = AutoTokenizer.from_pretrained(tiny_directory())
    config = AutoConfig.for_model(
        model_type,
        vocab_size=300,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        initializer_range=0.3,
        **{"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2},
        **CASES[model_type][0],
    )
    torch.manual_seed(0)
    directory = folder_of_whole_run("scaled-model-")
    AutoModelForCausalLM.from_config(config).float().save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("model_type", CASES)
def test_steps_are_those_of_a_plain_peft_loop(model_type: str) -> None:
    directory = model_directory(model_type)
    assert load_torch_model(str(directory)).logit_transform == CASES[model_type][1]
    sides = ["--engine", "peft", "--engine", "peft-reference"]
    with pytest.raises(SystemExit) as end:
        main(["parity", *sides, "--model", str(directory), "--steps", "3", "--rank", "4", "--atol", "2e-5"])
    assert end.value.code == 0


@pytest.mark.parametrize("wrong", [LogitTransform(), LogitTransform(0.5, 3.0), LogitTransform(cap=3.1)])
def test_an_architecture_with_an_unknown_change_of_logits_is_refused(wrong: LogitTransform) -> None:
    model = load_torch_model(str(model_directory("gemma2")))
    check_architecture(model)
    model.logit_transform = wrong
    with pytest.raises(ModelDirectoryInvalid, match=r"Gemma2ForCausalLM, which changes .* does not support"):
        check_architecture(model)
