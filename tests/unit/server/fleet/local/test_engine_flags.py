"""The server refuses what a worker would refuse, before anything starts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from tinsmith_server.errors import StartupError
from tinsmith_server.fleet.local.commands import check_flags
from tinsmith_server.fleet.local.fleet import LocalFleet
from tinsmith_server.settings import Settings


def fleet(tmp_path: Path, engine: str, *flags: str, **settings: Any) -> LocalFleet:
    model = tmp_path / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text("{}")
    return LocalFleet(
        Settings(data=tmp_path / "data", models=(f"a={model}",), engine=engine, engine_flags=flags, **settings)
    )


@pytest.mark.parametrize(
    ("engine", "flags", "sentence"),
    [
        ("nemo-rl", ("--ranks", "3", "--tensor-parallel", "2"), "--tensor-parallel 2 .* give --ranks 2 or 4"),
        ("peft", ("--ranks", "2"), "--ranks: only nemo-rl and miles have ranks, not peft"),
        ("nemo-rl", ("--rank", "2"), "unrecognized arguments: --rank 2"),
        ("nemorl", (), "a worker knows no engine 'nemorl': peft, nemo-rl, miles, or module:factory"),
    ],
)
def test_flags_that_contradict_each_other_end_the_start_with_the_workers_sentence(
    tmp_path: Path, engine: str, flags: tuple[str, ...], sentence: str
) -> None:
    with pytest.raises(StartupError, match=f"^engine, engine_flags: {sentence}$"):
        fleet(tmp_path, engine, *flags)
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("flag", ["--max-rank", "--max-rank=4", "--no-deterministic-sampling", "--volume"])
def test_a_flag_that_the_server_gives_is_not_one_of_the_engines(tmp_path: Path, flag: str) -> None:
    with pytest.raises(StartupError, match="is set by the server itself; remove it"):
        fleet(tmp_path, "nemo-rl", flag)


OF_A_SAMPLER = "sampler, sampler_environment, sampler_flags"


@pytest.mark.parametrize("sampler", ["vllm", "sglang"])
def test_a_sampler_that_is_not_installed_ends_the_start(tmp_path: Path, sampler: str) -> None:
    sentence = (
        f"{sampler} is not installed in {tmp_path}/none. Install it in a separate virtual environment, and set its path"
    )
    with pytest.raises(StartupError, match=f"^{OF_A_SAMPLER}: {sentence}$"):
        fleet(tmp_path, "peft", sampler=sampler, sampler_environment=tmp_path / "none")


def test_a_sampler_is_looked_for_on_the_path_where_no_environment_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(StartupError, match=f"^{OF_A_SAMPLER}: vllm is not installed on the PATH"):
        fleet(tmp_path, "peft", sampler="vllm")
    (tmp_path / "vllm").touch(0o755)
    fleet(tmp_path, "peft", sampler="vllm")


def test_a_python_without_a_worker_is_reported_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lone = tmp_path / "python"
    lone.write_text("#!/bin/sh\necho 'No module named tinsmith_trainer' >&2; exit 1\n")
    lone.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(lone))
    with pytest.raises(StartupError, match=r"^engine, engine_flags: No module named tinsmith_trainer$"):
        check_flags("engine, engine_flags", ["--ranks", "2"])
