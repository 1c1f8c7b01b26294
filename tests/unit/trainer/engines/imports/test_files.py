"""An imported adapter fits this base model, or is refused with the file and the reason."""

from __future__ import annotations

import json
import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save
from tinsmith_trainer.engines.base import AdapterState, AnnouncedAdapter, LoraSpec
from tinsmith_trainer.engines.imports.files import check_copy, read_adapter, stored_embeddings
from tinsmith_trainer.errors import CheckpointInvalid
from tinsmith_trainer.torch_model.weight_files import StoredTensor
from transformers import LlamaConfig

RANK, D_IN, D_OUT = 2, 4, 6
Q, V, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.v_proj", "model.layers.0.mlp.down_proj"
HEAD = "lm_head"
EXPERTS = "model.layers.1.mlp.experts"
ANNOUNCED = AnnouncedAdapter(RANK, 0)
FAMILY = {Q: "attn", V: "attn", DOWN: "mlp", HEAD: "unembed"}


def shapes_of(lora: LoraSpec) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a model with four layers and experts in its MLPs."""
    shapes: dict[str, tuple[int, ...]] = {}
    for module, family in FAMILY.items():
        if getattr(lora, f"train_{family}"):
            shapes |= {f"{module}.lora_A": (lora.rank, D_IN), f"{module}.lora_B": (D_OUT, lora.rank)}
    if lora.train_mlp:
        shapes |= {f"{EXPERTS}.w1.lora_A": (1, lora.rank, D_IN), f"{EXPERTS}.w1.lora_B": (3, D_OUT, lora.rank)}
        shapes |= {f"{EXPERTS}.w2.lora_A": (3, lora.rank, D_OUT), f"{EXPERTS}.w2.lora_B": (1, D_IN, lora.rank)}
    return shapes


def pair(module: str, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(len(module))
    a, b = torch.randn(RANK, D_IN, generator=draw), torch.randn(D_OUT, RANK, generator=draw)
    prefix = f"base_model.model.{module}.lora_"
    return {f"{prefix}A.weight": a.to(dtype), f"{prefix}B.weight": b.to(dtype)}


def read(
    tensors: dict[str, torch.Tensor] | bytes, announced: AnnouncedAdapter = ANNOUNCED, **fields: Any
) -> AdapterState:
    config = json.dumps({"peft_type": "LORA", "r": RANK, "lora_alpha": 8, **fields}).encode()
    return read_adapter(config, tensors if isinstance(tensors, bytes) else save(tensors), announced, shapes_of)


def refused(tensors: dict[str, torch.Tensor] | bytes, **fields: Any) -> str:
    with pytest.raises(CheckpointInvalid) as error:
        read(tensors, **fields)
    return str(error.value)


def test_modules_that_are_left_out_of_a_family_add_nothing_and_can_be_trained() -> None:
    state = read(pair(Q))
    assert not state.tensors[f"weights/{V}.lora_B"].any()
    assert state.tensors[f"weights/{V}.lora_A"].all()
    assert np.array_equal(state.tensors[f"weights/{Q}.lora_B"], pair(Q)[f"base_model.model.{Q}.lora_B.weight"].numpy())


def test_names_of_tinkers_archives_are_understood() -> None:
    tensors = pair("model.unembed_tokens") | pair(Q.replace("self_attn", "attn"))
    empty = {f"base_model.model.{EXPERTS}.w3.lora_{part}.weight": torch.zeros(0) for part in "AB"}
    state = read(tensors | empty)
    assert state.lora.train_unembed
    assert not state.lora.train_mlp
    assert state.tensors[f"weights/{HEAD}.lora_B"].any()
    assert state.tensors[f"weights/{Q}.lora_B"].any()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"peft_type": "LOHA"}, "is for 'LOHA'"),
        ({"use_dora": True}, "has DoRA"),
        ({"bias": "all", "modules_to_save": ["embed_tokens"]}, "has whole modules and biases"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
        ({"init_lora_weights": "pissa_niter_16"}, "path_initial_model_for_weight_conversion"),
        ({"init_lora_weights": "OLoRA"}, "path_initial_model_for_weight_conversion"),
        ({"init_lora_weights": "loftq"}, "Merge the adapter"),
        ({"init_lora_weights": "of a later PEFT"}, "init_lora_weights is 'of a later PEFT'"),
        ({"alora_invocation_tokens": [1, 2]}, "aLoRA, which is active from an invocation on (alora_invocation_tokens)"),
        ({"kasa_config": {"beta": 1e-4}}, "has KaSA (kasa_config)"),
        ({"a_later_field": False}, "the field 'a_later_field' is unknown"),
        ({"r": 0}, "needs positive"),
        ({"r": "2"}, "needs positive"),
        ({"lora_alpha": None}, "needs positive"),
        ({"lora_alpha": "inf"}, "needs positive"),
        ({"lora_alpha": 10**400}, "needs positive"),
        ({"lora_alpha": 1e300}, "at most 1e+06"),
        ({"alpha_pattern": {"q_proj": 10**400}}, "must hold positive numbers"),
        ({"r": 3}, "has rank 3, but rank 2 was announced"),
        ({"alpha_pattern": {"q_proj": 3}}, "scales its layers differently"),
        ({"rank_pattern": {"q_proj": 0}}, "must hold positive numbers"),
        ({"rank_pattern": [1]}, "must hold positive numbers"),
    ],
)
def test_a_configuration_that_is_not_plain_lora_is_refused(fields: dict[str, Any], message: str) -> None:
    sentence = refused(pair(Q), **fields)
    assert sentence.startswith("adapter_config.json")
    assert message in sentence


@pytest.mark.parametrize("config", [b"", b"[1]", b"null", b"\xff", b"[" * 100_000])
def test_a_configuration_that_is_not_a_json_object_is_refused(config: bytes) -> None:
    with pytest.raises(CheckpointInvalid, match="not PEFT's configuration for LoRA"):
        read_adapter(config, save(pair(Q)), ANNOUNCED, shapes_of)


@pytest.mark.parametrize(
    "content", [b"", b"\x08", pickle.dumps({"a": 1}), save(pair(Q))[:-1], b"\xff" * 8, (2**40).to_bytes(8, "little")]
)
def test_weights_that_are_no_safetensors_are_refused_and_never_unpickled(content: bytes) -> None:
    assert "not a complete safetensors file" in refused(content)


@pytest.mark.parametrize(
    ("header", "says"),
    [
        pytest.param(b'{"__metadata__":{"a":"' + b"a" * 200_000 + b'"}}', "has a header of 200025 bytes", id="bytes"),
        pytest.param(b'{"a":[' + b"[]," * 2_000 + b"[]]}", "has a header of 4003 values", id="values"),
    ],
)
def test_a_header_that_no_adapter_of_the_base_model_has_is_not_parsed(
    header: bytes, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinsmith_trainer.engines.imports.files._header_in", lambda _: pytest.fail("it was parsed"))
    assert says in refused(len(header).to_bytes(8, "little") + header)


def test_other_numbers_than_finite_halves_and_floats_are_refused() -> None:
    a = f"base_model.model.{Q}.lora_A.weight"
    assert "is int8" in refused(pair(Q) | {a: torch.ones(RANK, D_IN, dtype=torch.int8)})
    assert "not finite" in refused(pair(Q) | {a: torch.full((RANK, D_IN), math.nan)})
    assert "holds no tensor" in refused({})


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (pair("model.layers.7.self_attn.q_proj"), "which this base model does not have"),
        (pair("model.embed_tokens"), "adapters on this server cannot have a part"),
        ({"x" * 5000: torch.ones(1)}, "is not a factor of a LoRA adapter"),
        ({f"base_model.model.{Q}.lora_magnitude_vector": torch.ones(1)}, "is not a factor of a LoRA adapter"),
        ({f"base_model.model.{Q}.lora_A.weight": torch.ones(RANK, D_IN)}, f"without {Q}.lora_B"),
        (pair(Q) | {f"base_model.model.{Q}.lora_A.weight": torch.ones(3, D_IN)}, "has shape [3, 4]"),
        (pair(f"{EXPERTS}.0.gate_proj"), "lacks"),
        (pair(f"{EXPERTS}.base_layer"), "is missing: adapters of experts have both"),
    ],
)
def test_names_and_shapes_that_are_not_the_base_models_are_refused(tensors: dict[str, Any], message: str) -> None:
    sentence = refused(tensors)
    assert message in sentence
    assert len(sentence) < 500


def test_a_family_that_was_announced_as_left_out_is_refused() -> None:
    with pytest.raises(CheckpointInvalid, match="train_attn was announced as False"):
        read(pair(Q), AnnouncedAdapter(RANK, 0, train_attn=False))


def test_experts_with_factors_of_their_own_on_both_sides_are_refused() -> None:
    draw = torch.Generator().manual_seed(0)
    shapes = {"w1.lora_A": (3, RANK, D_IN), "w1.lora_B": (3, D_OUT, RANK)}
    prefix = f"base_model.model.{EXPERTS}"
    tensors = {f"{prefix}.{name}.weight": torch.randn(shape, generator=draw) for name, shape in shapes.items()}
    assert "differs between experts" in refused(tensors)
    a = f"base_model.model.{EXPERTS}.w1.lora_A.weight"
    shared = read(tensors | {a: tensors[a][:1].expand(3, -1, -1).clone()})
    assert shared.tensors[f"weights/{EXPERTS}.w1.lora_A"].shape == (1, RANK, D_IN)


def test_a_file_that_is_larger_than_any_adapter_of_the_base_model_is_refused_by_its_header_alone() -> None:
    key = f"base_model.model.{Q}.lora_A.weight"
    size = 20 * 2**20
    header = json.dumps({key: {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}}).encode()
    sentence = refused(len(header).to_bytes(8, "little") + header + bytes(size))
    assert "bytes; the limit for rank 2 on this base model is" in sentence


@pytest.fixture
def embeddings(tmp_path: Path) -> dict[str, StoredTensor]:
    """Return the input embedding of a base model with tied embeddings."""
    values = torch.randn(5, 3, generator=torch.Generator().manual_seed(1))
    (tmp_path / "model.safetensors").write_bytes(save({"model.embed_tokens.weight": values}))
    (tmp_path / "config.json").write_text("{}")
    return stored_embeddings(tmp_path, LlamaConfig())


@pytest.mark.parametrize("name", ["model.embed_tokens", "lm_head", "lm_head.base_layer"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_embedding_in_an_adapter_is_accepted_only_as_a_copy_of_the_base_models(
    embeddings: dict[str, StoredTensor], name: str, dtype: torch.dtype
) -> None:
    key = f"base_model.model.{name}.weight"
    values = torch.randn(5, 3, generator=torch.Generator().manual_seed(1)).to(dtype)
    check_copy(key, values, embeddings)
    with pytest.raises(CheckpointInvalid, match=r"has shape \[6, 3\], and the base model's has \[5, 3\]"):
        check_copy(key, torch.zeros(6, 3, dtype=dtype), embeddings)
    with pytest.raises(CheckpointInvalid, match="differs from the base model's: the embedding was fully trained"):
        check_copy(key, values + 1, embeddings)
    with pytest.raises(CheckpointInvalid, match="differs from the base model's"):
        check_copy(key, values, {})
