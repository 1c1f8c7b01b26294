from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.tiny_models import tiny_directory, tiny_model
from tinsmith_trainer.errors import ModelDirectoryInvalid, ModelNotFound
from tinsmith_trainer.torch_model.loading import files_digest, load_torch_model

WEIGHTS = "model.safetensors"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Return a copy that a test may damage."""
    return Path(shutil.copytree(tiny_directory(), tmp_path / "model"))


def truncate(directory: Path) -> None:
    path = directory / WEIGHTS
    path.write_bytes(path.read_bytes()[:-1000])


def set_config(directory: Path, **changes: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_the_base_is_frozen_and_every_linear_layer_can_carry_adapters() -> None:
    model = tiny_model()
    assert not any(parameter.requires_grad for parameter in model.model.parameters())
    assert not model.model.training
    assert len(model.layers) == 2 * 7 + 1


def remove_tokenizer(directory: Path) -> None:
    for path in directory.glob("tokenizer*"):
        path.unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        pytest.param(lambda d: (d / "config.json").unlink(), r"config\.json is missing", id="no-config"),
        pytest.param(lambda d: (d / "config.json").write_text("{"), r"config\.json is not valid JSON", id="bad-config"),
        pytest.param(lambda d: set_config(d, model_type="no-such"), "no-such", id="unknown-architecture"),
        pytest.param(
            lambda d: set_config(d, hidden_act="no-such"), r"config\.json: KeyError.*no-such", id="unknown-part"
        ),
        pytest.param(lambda d: (d / WEIGHTS).unlink(), r"no weights: expected \*\.safetensors", id="no-weights"),
        pytest.param(truncate, r"model\.safetensors is truncated", id="truncated"),
        pytest.param(lambda d: (d / "tokenizer.json").write_text("{"), "tokenizer in", id="bad-tokenizer"),
        pytest.param(remove_tokenizer, "has no tokenizer", id="no-tokenizer"),
    ],
)
def test_the_error_of_an_unloadable_directory_names_the_reason(
    directory: Path, damage: Callable[[Path], object], message: str
) -> None:
    damage(directory)
    with pytest.raises(ModelDirectoryInvalid, match=message):
        load_torch_model(str(directory))


def test_a_want_of_memory_is_not_blamed_on_the_directory(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def has_no_room(*_arguments: object, **_options: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 68719476736 bytes.")

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", has_no_room)
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        load_torch_model(str(directory))


def test_a_name_without_a_directory_or_a_repository_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelNotFound, match=r"no-owner/nothing.*Use a local directory"):
        load_torch_model("no-owner/nothing")


def test_the_revision_follows_the_weights_and_the_config_and_nothing_else(directory: Path) -> None:
    original = files_digest(directory)
    assert original == tiny_model().info.revision

    (directory / "README.md").write_text("words")
    assert files_digest(directory) == original

    set_config(directory, rms_norm_eps=1e-5)
    changed_config = files_digest(directory)
    assert changed_config != original

    weights = bytearray((directory / WEIGHTS).read_bytes())
    weights[-1] ^= 1
    (directory / WEIGHTS).write_bytes(weights)
    assert files_digest(directory) not in (original, changed_config)


def test_convolutions_of_a_model_in_float32_are_not_rounded_to_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    load_torch_model(str(tiny_directory()))
    assert not torch.backends.cudnn.allow_tf32
