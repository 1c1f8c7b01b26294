"""The command lines of an embedded worker and of its sampler."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tinsmith_server.configuration import load_settings
from tinsmith_server.errors import StartupError
from tinsmith_server.fleet.local.commands import SamplerCommand, WorkerCommand
from tinsmith_server.fleet.local.devices import places
from tinsmith_server.fleet.local.model_sources import ModelDirectory, locate_models
from tinsmith_server.settings import Settings


def settings_and_directory(tmp_path: Path, **settings: object) -> tuple[Settings, list[ModelDirectory]]:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    return load_settings({"data": tmp_path / "data", **settings}, None), locate_models([f"tiny={model}"])


def commands(tmp_path: Path, **settings: object) -> tuple[list[str], list[str]]:
    """Return the command lines of a worker and of a sampler."""
    loaded, [directory] = settings_and_directory(tmp_path, **settings)
    worker, sampler = WorkerCommand(loaded, directory), SamplerCommand(loaded, directory)
    return worker(tmp_path / "socket", 3), sampler(tmp_path / "socket", 3)


def value(command: list[str], flag: str) -> str:
    return command[command.index(flag) + 1]


def test_a_worker_gets_the_number_of_bits_of_its_weights(tmp_path: Path) -> None:
    worker, _ = commands(tmp_path, quantization="4bit")
    assert value(worker, "--quantization") == "4bit"


def test_a_worker_gets_its_numerics_and_a_separate_sampler_has_none(tmp_path: Path) -> None:
    worker, sampler = commands(tmp_path, numerics="exact", sampler="vllm")
    assert value(worker, "--numerics") == "exact"
    assert "--numerics" not in sampler


def test_a_worker_with_a_separate_sampler_does_not_sample(tmp_path: Path) -> None:
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


def test_each_device_has_a_worker_with_its_own_volume(tmp_path: Path) -> None:
    settings, [directory] = settings_and_directory(tmp_path, devices="1,GPU-5f,cpu,cpu")
    found = places(settings.devices)
    volumes = [WorkerCommand(settings, directory, place).volume.name for place in found]
    weights = directory.served.weights
    assert volumes == [weights, f"{weights}-2", f"{weights}-3", f"{weights}-4"]
    assert [place.environment["CUDA_VISIBLE_DEVICES"] for place in found] == ["1", "GPU-5f", "", ""]
    told = [WorkerCommand(settings, directory, place)(tmp_path / "socket", 3) for place in found]
    assert [value(command, "--device") for command in told] == ["cuda", "cuda", "cpu", "cpu"]


def test_a_sampler_is_on_its_workers_device(tmp_path: Path) -> None:
    settings, [directory] = settings_and_directory(tmp_path, devices="0,1", sampler="vllm")
    pairs = [
        (WorkerCommand(settings, directory, place), SamplerCommand(settings, directory, place))
        for place in places(settings.devices)
    ]
    sockets = [value(command(tmp_path / "socket", 3), "--saves-socket") for pair in pairs for command in pair]
    assert sockets[0] == sockets[1] != sockets[2] == sockets[3]
    assert "--device" not in pairs[0][1](tmp_path / "socket", 3)


@pytest.mark.parametrize(
    ("devices", "sentence"),
    [
        ("0,one", "'one' is not a device; give GPUs by index or UUID, as in `0,1`, or `cpu`"),
        ("0,00", "'00' is not a device; give GPUs by index or UUID"),
        ("0,1,0", "evice 0 is given twice; two workers would share its memory, so give it once"),
    ],
)
def test_an_invalid_device_is_refused(devices: str, sentence: str) -> None:
    with pytest.raises(StartupError, match=re.escape(sentence)):
        load_settings({"devices": devices}, None)


def test_an_engine_that_places_its_own_ranks_takes_no_devices() -> None:
    with pytest.raises(StartupError, match="a worker of nemo-rl chooses its GPUs itself"):
        load_settings({"devices": "0,1", "engine": "nemo-rl"}, None)
