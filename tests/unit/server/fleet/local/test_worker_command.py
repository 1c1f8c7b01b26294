"""What an embedded worker is started with, and the sampler beside it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tinsmith_server.configuration import load_settings
from tinsmith_server.fleet.local.commands import SamplerCommand, WorkerCommand
from tinsmith_server.fleet.local.model_sources import locate_models


def commands(tmp_path: Path, **settings: object) -> tuple[list[str], list[str]]:
    """Of a worker, and of a sampler."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    [directory] = locate_models([f"tiny={model}"])
    loaded = load_settings({"data": tmp_path / "data", **settings}, None)
    worker, sampler = WorkerCommand(loaded, directory), SamplerCommand(loaded, directory)
    return worker(tmp_path / "socket", 3), sampler(tmp_path / "socket", 3)


def value(command: list[str], flag: str) -> str:
    return command[command.index(flag) + 1]


def test_an_engine_gets_its_flags(tmp_path: Path) -> None:
    worker, _ = commands(tmp_path, engine="nemo-rl", engine_flags="--ranks 2")
    assert value(worker, "--engine") == "nemo-rl"
    assert worker[-2:] == ["--ranks", "2"]
    assert "--no-sampling" not in worker
    assert "--saves-socket" not in worker


def test_a_worker_is_told_in_how_few_bits_it_keeps_weights(tmp_path: Path) -> None:
    worker, _ = commands(tmp_path, quantization="4bit")
    assert value(worker, "--quantization") == "4bit"


def test_a_worker_with_a_sampler_beside_it_does_not_sample(tmp_path: Path) -> None:
    worker, sampler = commands(
        tmp_path,
        sampler="vllm",
        sampler_environment=tmp_path / "vllm",
        sampler_flags="--gpus 2 --server-argument=--gpu-memory-utilization=0.5",
    )
    assert "--no-sampling" in worker
    assert value(sampler, "--role") == "sampler"
    assert value(sampler, "--engine") == "vllm"
    assert value(sampler, "--server-environment") == str(tmp_path / "vllm")
    assert sampler[-3:] == ["--gpus", "2", "--server-argument=--gpu-memory-utilization=0.5"]


def test_both_read_adapters_at_one_place_and_take_the_same_ones(tmp_path: Path) -> None:
    worker, sampler = commands(tmp_path, sampler="vllm", max_rank=16, adapter_slots=3)
    for flag in ("--model", "--checkpoint-root", "--saves-socket", "--max-rank", "--adapter-slots"):
        assert value(worker, flag) == value(sampler, flag)


@pytest.mark.parametrize("flags", ["--dtype float32 --token-budget 9", "--token-budget=9 --dtype=float32"])
def test_a_sampler_serves_the_base_model_as_the_worker_trains_it(tmp_path: Path, flags: str) -> None:
    _, sampler = commands(tmp_path, sampler="vllm", engine_flags=flags)
    assert " ".join(sampler).replace("=", " ").endswith("--dtype float32")


def test_a_sampler_may_be_told_otherwise(tmp_path: Path) -> None:
    _, sampler = commands(tmp_path, sampler="vllm", engine_flags="--dtype float32", sampler_flags="--dtype=bfloat16")
    assert "--dtype" not in sampler
    assert sampler[-1] == "--dtype=bfloat16"
