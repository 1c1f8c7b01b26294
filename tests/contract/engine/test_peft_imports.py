"""Adapters that real PEFT writes come in and say what they say there, or are refused with the reason."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, VeloraConfig, get_peft_model
from peft.tuners.lora.config import BdLoraConfig, KasaConfig
from safetensors.torch import load_file, save_file
from support.engine.contract import forward
from support.engine.datums import sft_datum
from support.tiny_models import SMALL, TIED, tiny_directory, tiny_model
from tinsmith_trainer.engines.base import AnnouncedAdapter
from tinsmith_trainer.engines.peft import PeftEngine, build_peft_engine
from tinsmith_trainer.errors import CheckpointInvalid
from tinsmith_trainer.torch_model.tiny_model import TinyShape
from torch.nn.functional import log_softmax
from transformers import AutoModelForCausalLM

DATUMS = [sft_datum(length, seed) for seed, length in enumerate((5, 12))]
RANK = 4
FILES = ("adapter_config.json", "adapter_model.safetensors")

# PEFT asks transformers under a name that transformers 5.23 renames, and says when it saves embeddings.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`:UserWarning"),
    pytest.mark.filterwarnings("ignore:Model .*tie_word_embeddings:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*changes the base weights of the model:UserWarning"),
]


def base(shape: TinyShape = SMALL) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_directory("qwen3", shape), dtype=torch.float32).eval()


def new_peft_model(shape: TinyShape = SMALL, **fields: Any) -> Any:
    """Return PEFT's model with a new adapter."""
    fields = {"target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM", **fields}
    torch.manual_seed(3)
    return get_peft_model(base(shape), LoraConfig(r=RANK, lora_alpha=6, **fields)).eval()


def move(model: Any) -> None:
    torch.manual_seed(4)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))


def imported(folder: Path, shape: TinyShape = SMALL, rank: int = RANK) -> PeftEngine:
    engine = build_peft_engine(tiny_model("qwen3", shape))
    config, weights = ((folder / name).read_bytes() for name in FILES)
    engine.load_state("a", engine.read_adapter(config, weights, AnnouncedAdapter(rank, 0)), with_optimizer=False)
    return engine


def refusal(folder: Path, shape: TinyShape = SMALL) -> str:
    with pytest.raises(CheckpointInvalid) as refused:
        imported(folder, shape)
    return str(refused.value)


@torch.no_grad()
def assert_says_the_same(engine: PeftEngine, model: Any) -> None:
    for datum, output in zip(DATUMS, forward(engine, DATUMS).outputs, strict=True):
        tokens = torch.tensor(datum.tokens, dtype=torch.int64)[None]
        targets = torch.tensor(datum.loss_inputs["target_tokens"])[:, None]
        expected = log_softmax(model(input_ids=tokens).logits[0], -1).gather(-1, targets)[:, 0]
        np.testing.assert_allclose(output["logprobs"], expected.numpy(), atol=1e-4)


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"init_lora_weights": True}, id="default"),
        pytest.param({"init_lora_weights": False}, id="random"),
        pytest.param({"init_lora_weights": "gaussian"}, id="gaussian"),
        pytest.param({"init_lora_weights": "orthogonal"}, id="orthogonal"),
        pytest.param({"init_lora_weights": "mica"}, id="mica"),
        pytest.param({"use_rslora": True}, id="rslora"),
        pytest.param({"layers_to_transform": [0], "lora_dropout": 0.1}, id="one-layer"),
        pytest.param({"target_modules": "all-linear", "exclude_modules": ["v_proj"]}, id="excluded"),
    ],
)
def test_plain_lora_has_the_same_logprobs_as_in_peft(fields: Mapping[str, Any], tmp_path: Path) -> None:
    model = new_peft_model(**fields)
    move(model)
    model.save_pretrained(tmp_path)
    assert_says_the_same(imported(tmp_path), model)


@pytest.mark.parametrize("initialization", ["pissa", "pissa_niter_4", "olora"])
def test_adapters_on_changed_base_weights_are_refused_until_peft_has_converted_them(
    initialization: str, tmp_path: Path
) -> None:
    model = new_peft_model(init_lora_weights=initialization)
    model.peft_config["default"].init_lora_weights = True
    model.save_pretrained(tmp_path / "first")
    model.peft_config["default"].init_lora_weights = initialization
    move(model)
    model.save_pretrained(tmp_path / "changed")
    model.save_pretrained(tmp_path / "plain", path_initial_model_for_weight_conversion=str(tmp_path / "first"))

    said = refusal(tmp_path / "changed")
    assert f"init_lora_weights is '{initialization}'" in said
    assert "path_initial_model_for_weight_conversion" in said
    assert_says_the_same(imported(tmp_path / "plain", rank=2 * RANK), model)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("alora_invocation_tokens", [1, 2]),
        ("kasa_config", KasaConfig()),
        ("use_bdlora", BdLoraConfig(target_modules_bd_a=["q_proj"], target_modules_bd_b=["down_proj"], nblocks=2)),
        ("use_dora", True),
        ("velora_config", VeloraConfig()),
    ],
)
def test_variants_of_lora_are_refused_by_their_field(field: str, value: object, tmp_path: Path) -> None:
    new_peft_model(**{field: value}).save_pretrained(tmp_path)
    assert f"({field})" in refusal(tmp_path)


@pytest.mark.parametrize("shape", [pytest.param(SMALL, id="apart"), pytest.param(TIED, id="tied")])
@pytest.mark.parametrize(
    ("fields", "options"),
    [
        pytest.param({"target_modules": ["q_proj", "lm_head"]}, {}, id="on-the-head"),
        pytest.param({}, {"save_embedding_layers": True}, id="as-told"),
    ],
)
def test_copies_of_the_base_models_embeddings_change_nothing(
    fields: Mapping[str, Any], options: Mapping[str, Any], shape: TinyShape, tmp_path: Path
) -> None:
    model = new_peft_model(shape, **fields)
    move(model)
    model.save_pretrained(tmp_path, **options)
    written = load_file(tmp_path / FILES[1])
    assert any("lora_" not in key for key in written)
    assert_says_the_same(imported(tmp_path, shape), PeftModel.from_pretrained(base(shape), tmp_path).eval())

    halves = {key: tensor if "lora_" in key else tensor.bfloat16() for key, tensor in written.items()}
    save_file(halves, tmp_path / FILES[1])
    imported(tmp_path, shape)
