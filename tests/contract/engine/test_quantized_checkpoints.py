"""Checkpoints that hold MXFP4 or FP8 are read as the weights that those stand for; other formats are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.zoo.stored_formats import (
    FORMATS,
    TOKENS,
    check_dequantized,
    make,
    read_as_its_dense_twin,
    say_format,
    say_generation,
)
from tinsmith_trainer.engines.base import LoraSpec
from tinsmith_trainer.engines.peft import build_peft_engine
from tinsmith_trainer.errors import ModelDirectoryInvalid
from tinsmith_trainer.torch_model.loading import load_torch_model
from tinsmith_trainer.torch_model.quantization import load_to_save
from transformers import AutoConfig, AutoModelForCausalLM

pytestmark = pytest.mark.core


@pytest.mark.parametrize("method", FORMATS)
def test_a_quantized_checkpoint_is_the_model_that_it_stands_for(method: str, tmp_path: Path) -> None:
    model, plain = read_as_its_dense_twin(method, tmp_path)
    assert model.info.stored_as == method
    engine = build_peft_engine(model)
    engine.create_adapter("a", LoraSpec(rank=4, alpha=8.0, seed=1))
    engine.export(engine.state("a"), tmp_path / "merged", "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert not hasattr(merged.config, "quantization_config")
    with torch.no_grad():
        torch.testing.assert_close(merged(TOKENS).logits, plain(TOKENS).logits, atol=1e-5, rtol=0)


@pytest.mark.parametrize("method", FORMATS)
def test_a_model_that_was_made_dense_runs_as_it_is_and_generates_as_its_makers_say(method: str, tmp_path: Path) -> None:
    stored, dense = make(method, tmp_path)
    say_generation((stored, dense))
    plain = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32)
    made = load_to_save(AutoModelForCausalLM, stored, AutoConfig.from_pretrained(stored), torch.float32)
    check_dequantized(made, plain, tmp_path / "written")


def test_a_format_that_is_not_read_is_refused_with_those_that_are(tmp_path: Path) -> None:
    _, dense = make("mxfp4", tmp_path)
    say_format(dense, {"quant_method": "awq", "bits": 4})
    with pytest.raises(ModelDirectoryInvalid, match="quantized by 'awq'; supported are mxfp4 and fp8"):
        load_torch_model(str(dense))
