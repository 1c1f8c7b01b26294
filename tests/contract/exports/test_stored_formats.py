"""A client merges into a base that holds MXFP4 or FP8 as into the weights that those stand for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.zoo.stored_formats import FORMATS, TOKENS, check_made_dense, make, say_format, say_generation
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


@pytest.mark.parametrize("method", FORMATS)
def test_a_model_that_was_made_dense_runs_as_it_is_and_generates_as_its_makers_say(method: str, tmp_path: Path) -> None:
    stored, dense = make(method, tmp_path)
    say_generation((stored, dense))
    plain = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32)
    made = BaseModel(str(stored)).load()
    check_made_dense(made, plain, tmp_path / "written")


def test_a_format_that_is_not_read_is_refused_with_those_that_are(tmp_path: Path) -> None:
    _, dense = make("mxfp4", tmp_path)
    say_format(dense, {"quant_method": "awq", "bits": 4})
    with pytest.raises(BaseModelUnusable, match="quantized by 'awq', and only mxfp4 and fp8 are made dense here"):
        BaseModel(str(dense)).load()
