"""`tinsmith make-tiny-model` and `tinsmith export`."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import fsspec
import numpy as np
import pytest
import torch
from peft import PeftModel
from tinsmith.cli import main
from tinsmith_trainer.checkpoints.checkpoint_root import MANIFEST_FILE, CheckpointRoot
from tinsmith_trainer.engines.base import AdapterState, LoraSpec
from tinsmith_trainer.engines.peft import build_peft_engine
from tinsmith_trainer.torch_model.loading import load_torch_model
from tinsmith_trainer.torch_model.tiny_model import make_tiny_model
from torch import Tensor
from transformers import AutoModelForCausalLM

TOKENS = torch.tensor([[5, 9, 2, 14, 7, 11, 3, 8]])


def run_command(*arguments: object) -> int:
    with pytest.raises(SystemExit) as end:
        main([str(argument) for argument in arguments])
    return int(end.value.code or 0)


@pytest.fixture(scope="module")
def base_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, base_model: Path) -> Path:
    """Return a checkpoint of an adapter with a non-zero B, which changes the model's output."""
    engine = build_peft_engine(load_torch_model(str(base_model)))
    engine.create_adapter("run", LoraSpec(rank=4, alpha=32, seed=1))
    fresh = engine.state("run")
    draw = np.random.default_rng(1)
    tensors = {name: draw.normal(0, 0.02, tensor.shape).astype(np.float32) for name, tensor in fresh.tensors.items()}
    root = tmp_path_factory.mktemp("root")
    state = AdapterState(fresh.lora, fresh.optimizer_step, tensors)
    written = CheckpointRoot(root.as_uri()).write("run", 1, 1, "sampler", state, engine.base_model(), "weights")
    return root / written.directory


def logprobs_of(model: torch.nn.Module) -> Tensor:
    with torch.no_grad():
        return torch.log_softmax(model(TOKENS).logits.float(), dim=-1)


def load_base(directory: Path) -> torch.nn.Module:
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(directory)
    return model


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft calls transformers
def test_both_layouts_of_an_export_say_the_same(tmp_path: Path, base_model: Path, checkpoint: Path) -> None:
    for layout in ("peft", "merged"):
        arguments = ["--base-model", base_model, "--to", tmp_path / layout, "--layout", layout]
        assert run_command("export", checkpoint, *arguments) == 0
    adapted = logprobs_of(PeftModel.from_pretrained(load_base(base_model), tmp_path / "peft"))
    merged = logprobs_of(load_base(tmp_path / "merged"))
    assert torch.allclose(adapted, merged, atol=1e-5)
    assert not torch.allclose(adapted, logprobs_of(load_base(base_model)), atol=1e-2)


def test_a_checkpoint_is_exported_from_wherever_a_url_leads(tmp_path: Path, base_model: Path, checkpoint: Path) -> None:
    store = fsspec.filesystem("memory")
    store.put(str(checkpoint), "/bucket/weights/run/1-1", recursive=True)
    url = "memory://bucket/weights/run/1-1"
    assert run_command("export", url, "--base-model", base_model, "--to", tmp_path / "out", "--layout", "peft") == 0
    weights = "adapter_model.safetensors"
    assert (tmp_path / "out" / weights).read_bytes() == (checkpoint / weights).read_bytes()


def test_an_export_says_that_its_adapter_was_trained_on_few_bits(
    tmp_path: Path, base_model: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(checkpoint, tmp_path / "few")
    manifest = json.loads((tmp_path / "few" / MANIFEST_FILE).read_text())
    (tmp_path / "few" / MANIFEST_FILE).unlink()  # it is read-only
    (tmp_path / "few" / MANIFEST_FILE).write_text(json.dumps({**manifest, "base_model_quantization": "4bit"}))
    for folder, says in ((tmp_path / "few", True), (checkpoint, False)):
        arguments = ["--base-model", base_model, "--to", tmp_path / "out", "--layout", "peft"]
        assert run_command("export", folder, *arguments) == 0
        assert ("was trained on" in capsys.readouterr().err) is says


def export_error(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert run_command("export", *arguments, "--layout", "peft") == 1
    return capsys.readouterr().err


def test_a_directory_that_is_not_a_checkpoint_is_named(
    tmp_path: Path, base_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = export_error(capsys, tmp_path, "--base-model", base_model, "--to", tmp_path / "out")
    assert f"{tmp_path} is not a checkpoint" in said
    assert not (tmp_path / "out").exists()


def test_an_output_folder_that_cannot_be_written_is_named(
    tmp_path: Path, base_model: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/none")):
        assert run_command("export", checkpoint, "--base-model", base_model, "--to", folder, "--layout", "peft") == 2
        assert capsys.readouterr().err.startswith(f"tinsmith export: {folder} cannot be written: ")


def test_a_tinker_path_is_refused_with_the_alternative_in_an_image_without_the_program(tmp_path: Path) -> None:
    path = "tinker://run:train:0/weights/a"
    command = [sys.executable, "-m", "tinsmith_trainer.cli", "export", path, "--base-model", "any"]
    done = subprocess.run(
        [*command, "--to", str(tmp_path / "out"), "--layout", "peft"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr.startswith(f"tinsmith export: {path} is a name that only its server can resolve")
    assert "DATA/checkpoints/weights/" in done.stderr


def test_a_checkpoint_of_another_base_model_is_refused(
    tmp_path: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = make_tiny_model(tmp_path / "other", seed=9)
    said = export_error(capsys, checkpoint, "--base-model", other, "--to", tmp_path / "out")
    assert "belongs to another base model" in said


@pytest.mark.slow("starts programs that import PyTorch")
def test_the_commands_run_without_the_tinsmith_program(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tinsmith_trainer.cli", "make-tiny-model", str(tmp_path / "tiny")]
    subprocess.run(command, check=True, timeout=60)
    assert (tmp_path / "tiny" / "config.json").is_file()


@pytest.mark.slow("starts programs that import PyTorch")
def test_the_trainer_exports_without_the_tinsmith_program(tmp_path: Path, base_model: Path, checkpoint: Path) -> None:
    command = [sys.executable, "-m", "tinsmith_trainer.cli", "export", checkpoint, "--base-model", base_model]
    subprocess.run([*command, "--to", tmp_path / "out", "--layout", "peft"], check=True, timeout=60)
    assert (tmp_path / "out" / "adapter_config.json").is_file()
