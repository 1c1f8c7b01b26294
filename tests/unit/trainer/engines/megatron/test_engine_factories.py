"""The engine that a worker's flags build, and its colocated sampler."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

# Megatron's import may take longer on a busy machine than a unit test has: it belongs to none of them.
import tinsmith_trainer.engines.megatron.local_rank  # noqa: F401
from safetensors.torch import load_file, save_file
from support.tiny_models import SMALL, tiny_directory, tiny_model
from tinsmith_trainer.errors import ModelDirectoryInvalid, ServerError
from tinsmith_trainer.options import WorkerOptions, parse_options
from tinsmith_trainer.worker.engine_factories import build_on_ranks


def options(*flags: str, model: str = "") -> WorkerOptions:
    needed = ["--model", model or str(tiny_directory()), "--volume=v", "--socket=s", "--checkpoint-root=file:///c"]
    return parse_options([*needed, "--engine=nemo-rl", "--max-rank=8", *flags])


def test_the_flags_select_the_engine() -> None:
    engine, sampler = build_on_ranks(options("--no-sampling", "--adapter-slots=3", "--max-sequence-length=100"))
    assert sampler is None
    can = engine.capabilities()
    assert (can.engine, can.adapter_slots, can.max_rank, can.batch_invariant) == ("nemo-rl", 3, 8, False)
    assert engine.base_model().max_sequence_length == 100
    assert engine.base_model().revision == tiny_model().info.revision


def test_the_sampler_has_weights_of_its_own() -> None:
    _, sampler = build_on_ranks(options())
    assert sampler is not None
    sampler.close()


def test_a_setting_that_the_model_does_not_support_is_refused() -> None:
    with pytest.raises(ServerError, match=f"Give {SMALL.max_sequence_length} or less"):
        build_on_ranks(options(f"--max-sequence-length={SMALL.max_sequence_length + 1}"))
    with pytest.raises(ModelDirectoryInvalid, match=r"config\.json is missing"):
        build_on_ranks(options(model=str(tiny_directory().parent)))


def test_files_that_lack_a_tensor_are_refused_before_there_are_ranks(tmp_path: Path) -> None:
    directory = shutil.copytree(tiny_directory(), tmp_path / "model")
    tensors = load_file(directory / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelDirectoryInvalid, match=r"1 missing \(model\.norm\.weight\)"):
        build_on_ranks(options(model=str(directory)))
