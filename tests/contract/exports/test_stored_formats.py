"""A client merges into a base that holds MXFP4 or FP8 as into the weights that those stand for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.zoo.stored_formats import FORMATS, TOKENS, make
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
