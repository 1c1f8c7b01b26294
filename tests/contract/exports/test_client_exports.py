"""The client's exports of a checkpoint's files, which equal the trainer's for every kind of family."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from support.engine.datums import sft_datum
from support.tiny_models import TIED, tiny_directory
from support.zoo.families import family_directory
from tinsmith.training.errors import BaseModelUnusable
from tinsmith.training.exports.base_model import BaseModel
from tinsmith.training.exports.merging import merged_into
from tinsmith.training.exports.peft_adapter import for_peft
from tinsmith.training.exports.stored import StoredAdapter, read_adapter
from tinsmith_trainer.checkpoints.checkpoint_root import CheckpointRoot
from tinsmith_trainer.engines.base import AdapterState, Engine, LoraSpec
from tinsmith_trainer.engines.peft import build_peft_engine
from tinsmith_trainer.torch_model.loading import load_torch_model
from transformers import AutoModelForCausalLM

FAMILIES = ("llama", "tied", "qwen3_moe", "gpt_oss", "deepseek_v3", "qwen3_5_text", "falcon_h1", "mamba")
NOT_ADAPTED_BY_PEFT = {"falcon_h1", "mamba"}
WITHOUT_MLP = {"mamba"}
TOKENS = torch.from_numpy(sft_datum(12, seed=0).tokens)[None].long()

pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Model .*tie_word_embeddings:UserWarning"),
    # Said of parameters too, for which PEFT does take them.
    pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match:RuntimeWarning"),
]


@dataclass(frozen=True)
class Saved:
    family: str
    base: Path
    engine: Engine
    state: AdapterState
    adapter: StoredAdapter


def directory_of(family: str) -> Path:
    return tiny_directory("qwen3", TIED) if family == "tied" else family_directory(family)


@pytest.fixture(scope="module", params=FAMILIES)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    base = directory_of(request.param)
    return saved_of(request.param, base, tmp_path_factory.mktemp(request.param))


def saved_of(family: str, base: Path, folder: Path) -> Saved:
    """Return an adapter with parts everywhere, as the files of its checkpoint that a server's archive has."""
    engine = build_peft_engine(load_torch_model(str(base)))
    engine.create_adapter("a", LoraSpec(4, 8.0, 1, train_mlp=family not in WITHOUT_MLP))
    fresh, draw = engine.state("a"), np.random.default_rng(0)
    tensors = {name: draw.normal(0, 0.1, one.shape).astype(np.float32) for name, one in fresh.tensors.items()}
    state = AdapterState(fresh.lora, 0, tensors)
    written = CheckpointRoot(folder.as_uri()).write("run", 1, 1, "sampler", state, engine.base_model(), "weights")
    return Saved(family, base, engine, state, read_adapter(folder / written.directory, "org/model"))


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model.eval()(TOKENS).logits
    return logits


def plain(directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)


def test_a_merged_model_has_the_bits_of_the_trainers_export(saved: Saved, tmp_path: Path) -> None:
    (tmp_path / "trainers").mkdir()
    saved.engine.export(saved.state, tmp_path / "trainers", "merged")
    merged = merged_into(saved.adapter, BaseModel(str(saved.base)))
    merged.save_pretrained(tmp_path / "ours")
    trainers_tensors, client_tensors = (
        load_file(tmp_path / side / "model.safetensors") for side in ("trainers", "ours")
    )
    assert trainers_tensors.keys() == client_tensors.keys()
    assert [name for name in trainers_tensors if not torch.equal(trainers_tensors[name], client_tensors[name])] == []
    for name in ("config.json", "tokenizer.json"):
        assert json.loads((tmp_path / "trainers" / name).read_text()) == json.loads(
            (tmp_path / "ours" / name).read_text()
        )
    again = plain(tmp_path / "ours")
    assert torch.equal(logits_of(again), logits_of(merged.model))
    assert (logits_of(again) - logits_of(plain(saved.base))).abs().max() > 1e-2


def test_an_adapter_has_the_bits_of_the_trainers_export_and_says_what_the_merged_model_says(
    saved: Saved, tmp_path: Path
) -> None:
    (tmp_path / "trainers").mkdir()
    saved.engine.export(saved.state, tmp_path / "trainers", "peft")
    adapter = for_peft(saved.adapter, BaseModel(str(saved.base)), str(saved.base))
    adapter.save_pretrained(tmp_path / "ours")
    weights, config = "adapter_model.safetensors", "adapter_config.json"
    trainers_tensors, client_tensors = (load_file(tmp_path / side / weights) for side in ("trainers", "ours"))
    assert trainers_tensors.keys() == client_tensors.keys() == adapter.tensors.keys()
    assert [name for name in trainers_tensors if not torch.equal(trainers_tensors[name], client_tensors[name])] == []
    assert json.loads((tmp_path / "trainers" / config).read_text()) == json.loads(
        (tmp_path / "ours" / config).read_text()
    )
    if saved.family in NOT_ADAPTED_BY_PEFT:
        return
    adapted = PeftModel.from_pretrained(plain(saved.base), tmp_path / "ours")
    merged = merged_into(saved.adapter, BaseModel(str(saved.base)))
    assert torch.allclose(logits_of(adapted), logits_of(merged.model), atol=1e-4)


def test_a_base_in_bfloat16_stays_in_it(tmp_path: Path) -> None:
    half = tmp_path / "half"
    shutil.copytree(family_directory("llama"), half)
    plain(half).to(torch.bfloat16).save_pretrained(half)
    saved = saved_of("llama", half, tmp_path / "saved")
    merged = merged_into(saved.adapter, BaseModel(str(half)))
    assert {tensor.dtype for tensor in merged.tensors.values()} == {torch.bfloat16}
    name = "model.layers.0.self_attn.q_proj"
    expected = plain(half).get_submodule(name).weight + saved.adapter.delta(name)
    assert torch.equal(merged.tensors[f"{name}.weight"], expected.to(torch.bfloat16))


@pytest.mark.parametrize(
    ("family", "other"), [("llama", {"hidden_size": 32}), ("qwen3_moe", {"moe_intermediate_size": 16})]
)
def test_a_base_that_the_adapter_does_not_fit_is_refused_by_its_first_layer_that_differs(
    family: str, other: dict[str, int], tmp_path: Path
) -> None:
    adapter = saved_of(family, family_directory(family), tmp_path).adapter
    with pytest.raises(
        BaseModelUnusable, match=r"has shape \d.* there and \d.* in the adapter, which was trained on org/model"
    ):
        merged_into(adapter, BaseModel(str(family_directory(family, **other))))


def test_a_base_of_another_build_is_refused(tmp_path: Path) -> None:
    adapter = saved_of("qwen3_moe", family_directory("qwen3_moe"), tmp_path).adapter
    with pytest.raises(BaseModelUnusable, match="has shape none there"):
        merged_into(adapter, BaseModel(str(family_directory("llama"))))


def test_a_base_model_that_is_not_here_is_named(tmp_path: Path) -> None:
    with pytest.raises(BaseModelUnusable, match=f"the folder {tmp_path / 'none'} does not exist. Set base_model"):
        BaseModel(str(tmp_path / "none"))
    with pytest.raises(BaseModelUnusable, match=r"the base model org/unknown cannot be loaded: .*Set base_model"):
        BaseModel("org/unknown")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(BaseModelUnusable, match=f"the base model {tmp_path} cannot be loaded"):
        BaseModel(str(tmp_path)).load()


@pytest.mark.parametrize("change", ["lacks", "has another shape of"])
def test_a_base_model_without_a_tensor_of_its_architecture_is_refused(change: str, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(tiny_directory(), tmp_path / "model"))
    tensors, name = load_file(directory / "model.safetensors"), "model.layers.1.self_attn.q_proj.weight"
    changed = {} if change == "lacks" else {name: tensors[name][:-8].clone()}
    del tensors[name]
    save_file({**tensors, **changed}, directory / "model.safetensors", {"format": "pt"})
    with pytest.raises(BaseModelUnusable, match=rf"lacks tensors.* \(1: {name}\)\. Copy the model's files again"):
        BaseModel(str(directory)).load()


def test_a_base_model_with_an_adapter_among_its_files_is_refused(tmp_path: Path) -> None:
    directory = Path(shutil.copytree(tiny_directory(), tmp_path / "model"))
    (directory / "adapter_config.json").write_text("{}")
    with pytest.raises(BaseModelUnusable, match=r"contains a PEFT adapter \(adapter_config\.json\)"):
        BaseModel(str(directory))
