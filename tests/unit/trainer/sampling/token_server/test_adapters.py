"""Adapter versions as folders."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from peft import PeftModel
from safetensors.numpy import load_file
from support.sampler.jobs import random_adapter
from support.tiny_models import TIED, tiny_directory, tiny_model
from tinsmith_trainer.errors import ServerError, UserError
from tinsmith_trainer.sampling.token_server.adapters import AdapterFolders, check_adapter
from tinsmith_trainer.sampling.token_server.served_model import ServedModel, read_model
from transformers import AutoModelForCausalLM


@pytest.fixture(scope="module")
def model() -> ServedModel:
    return read_model(str(tiny_directory()))


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft calls transformers
def test_peft_reads_the_folder(tmp_path: Path, model: ServedModel) -> None:
    state = random_adapter(tiny_model())
    adapter = AdapterFolders(tmp_path).write("key", state, model)
    read = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model.directory), str(adapter.folder))
    weights = read.get_submodule("base_model.model.model.layers.0.self_attn.q_proj").lora_B["default"].weight
    expected = state.tensors["weights/model.layers.0.self_attn.q_proj.lora_B"]
    np.testing.assert_array_equal(weights.detach().numpy(), expected)
    assert json.loads((adapter.folder / "adapter_config.json").read_text())["lora_alpha"] == 32.0


def test_a_mixtures_experts_are_written_one_by_one(tmp_path: Path) -> None:
    state, mixture = random_adapter(tiny_model("qwen3-moe"), rank=4), read_model(str(tiny_directory("qwen3-moe")))
    check_adapter("key", state, mixture)
    adapter = AdapterFolders(tmp_path).write("key", state, mixture)
    found = load_file(adapter.folder / "adapter_model.safetensors")
    experts = "model.layers.0.mlp.experts"
    for number in range(8):
        own = found[f"base_model.model.{experts}.{number}.up_proj.lora_B.weight"]
        np.testing.assert_array_equal(own, state.tensors[f"weights/{experts}.w3.lora_B"][number])
    assert not any(".w3." in name for name in found)


def test_no_name_is_given_twice_in_any_life(tmp_path: Path, model: ServedModel) -> None:
    state = random_adapter(tiny_model())
    lives = [AdapterFolders(tmp_path / str(life)) for life in range(2)]
    names = [folders.write("the same key", state, model).name for folders in lives for _ in range(2)]
    assert len(set(names)) == 4


@pytest.mark.parametrize("key", ["../../etc", "a/b", "sha256:" + "0" * 80])
def test_a_key_never_leads_out_of_the_folder(tmp_path: Path, model: ServedModel, key: str) -> None:
    folders = AdapterFolders(tmp_path)
    adapter = folders.write(key, random_adapter(tiny_model()), model)
    assert adapter.folder.parent == tmp_path / "adapters"
    folders.remove(adapter)
    assert list((tmp_path / "adapters").iterdir()) == []


def test_the_remains_of_an_earlier_process_are_removed(tmp_path: Path) -> None:
    left = tmp_path / "adapters" / "old"
    left.mkdir(parents=True)
    (tmp_path / "cache").mkdir()
    AdapterFolders(tmp_path)
    assert not left.exists()
    assert (tmp_path / "cache").exists()


def test_a_full_disk_is_an_error_of_the_server_that_leaves_nothing(
    tmp_path: Path, model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Path, mode: str) -> int:
        raise OSError(28, "No space left on device")

    folders = AdapterFolders(tmp_path)
    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(ServerError, match=r"Adapter key cannot be written to .*: No space left on device\."):
        folders.write("key", random_adapter(tiny_model()), model)
    assert list((tmp_path / "adapters").iterdir()) == []


def test_an_unembedding_that_is_the_embedding_is_refused_with_the_cure() -> None:
    tied = read_model(str(tiny_directory(shape=TIED)))
    state = random_adapter(tiny_model(shape=TIED))
    with pytest.raises(UserError, match=r"Create the adapter with train_unembed=False, or sample from a session"):
        check_adapter("key", state, tied)
    check_adapter("key", random_adapter(tiny_model(shape=TIED), families=("attn", "mlp")), tied)
