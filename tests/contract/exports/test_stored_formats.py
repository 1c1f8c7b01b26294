"""A client merges into a base that holds MXFP4 or FP8 as into the weights that those stand for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from support.zoo.stored_formats import FORMATS, TOKENS, make
from tinsmith.training.errors import BaseModelUnusable
from tinsmith.training.exports.base_model import BaseModel
from tinsmith.training.exports.merging import MergedWeights
from transformers import AutoModelForCausalLM


@pytest.mark.parametrize("method", FORMATS)
def test_a_client_that_merges_into_one_has_the_model_that_it_stands_for(method: str, tmp_path: Path) -> None:
    stored, dense = make(method, tmp_path)
    MergedWeights(base := BaseModel(str(stored)), base.load()).save_pretrained(tmp_path / "merged")
    plain, merged = (AutoModelForCausalLM.from_pretrained(folder) for folder in (dense, tmp_path / "merged"))
    assert not hasattr(merged.config, "quantization_config")
    with torch.no_grad():
        torch.testing.assert_close(merged(TOKENS).logits, plain(TOKENS).logits, atol=1e-5, rtol=0)


def test_a_base_in_another_stored_format_is_refused_with_the_supported_ones(tmp_path: Path) -> None:
    config = {"model_type": "llama", "quantization_config": {"quant_method": "awq", "bits": 4}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(BaseModelUnusable, match="quantized with 'awq'; only mxfp4 and fp8 are supported"):
        BaseModel(str(tmp_path)).load()
