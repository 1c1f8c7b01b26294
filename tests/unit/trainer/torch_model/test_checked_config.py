"""A directory with an adapter and a model is refused: loaders disagree on whether the adapter belongs to the model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from support.tiny_models import tiny_directory
from tinsmith_trainer import conversion
from tinsmith_trainer.errors import ModelDirectoryInvalid
from tinsmith_trainer.options import parse_options
from tinsmith_trainer.parity.reference import PeftReference
from tinsmith_trainer.sampling.token_server.served_model import read_model
from tinsmith_trainer.torch_model.base_model import model_directory
from tinsmith_trainer.torch_model.loading import load_torch_model
from tinsmith_trainer.torch_model.stored_weights import checked_config
from tinsmith_trainer.worker.engine_factories import build_on_ranks

FLAGS = ("--volume=v", "--socket=s", "--checkpoint-root=file:///c", "--max-rank=8")
HOLDS_AN_ADAPTER = r"holds a PEFT adapter \(adapter_config\.json\).*`tinsmith import`"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Return a model directory with the remains of a training program."""
    made = Path(shutil.copytree(tiny_directory(), tmp_path / "model"))
    (made / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "base_model_name_or_path": "owner/base"})
    )
    return made


def build_ranks(directory: str) -> object:
    return build_on_ranks(parse_options(["--model", directory, *FLAGS, "--engine=nemo-rl", "--no-sampling"]))


def build_reference(directory: str) -> object:
    return PeftReference(parse_options(["--model", directory, *FLAGS]))


@pytest.mark.parametrize("load", [load_torch_model, read_model, build_ranks, build_reference])
def test_every_loader_refuses_it_and_says_what_to_do(directory: Path, load: Callable[[str], object]) -> None:
    with pytest.raises(ModelDirectoryInvalid, match=HOLDS_AN_ADAPTER) as caught:
        load(str(directory))
    assert str(directory) in str(caught.value)


def test_a_conversion_refuses_it(
    directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversion, "configure_logs", lambda *_: None)
    assert conversion.run([f"--model={directory}", "--engine=nemo-rl", "--ranks=1"]) == conversion.EXIT_FAILED
    assert "holds a PEFT adapter" in capsys.readouterr().err


def test_a_repository_of_the_hub_is_held_to_the_same(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(directory))
    with pytest.raises(ModelDirectoryInvalid, match=HOLDS_AN_ADAPTER):
        load_torch_model("owner/model")
    assert model_directory("owner/model") == directory


def test_an_adapter_without_a_model_is_recognized(directory: Path) -> None:
    (directory / "config.json").unlink()
    with pytest.raises(ModelDirectoryInvalid, match=HOLDS_AN_ADAPTER):
        checked_config(directory)


def test_an_adapter_in_a_folder_inside_is_no_part_of_the_model(directory: Path) -> None:
    (directory / "checkpoint-100").mkdir()
    (directory / "adapter_config.json").rename(directory / "checkpoint-100" / "adapter_config.json")
    checked_config(directory)
