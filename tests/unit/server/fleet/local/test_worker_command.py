"""What an embedded worker is started with."""

from __future__ import annotations

from pathlib import Path

from tinsmith_server.configuration import load_settings
from tinsmith_server.fleet.local.fleet import WorkerCommand
from tinsmith_server.fleet.local.model_sources import locate_models


def test_an_engine_gets_its_flags(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    settings = load_settings({"data": tmp_path / "data", "engine": "nemo-rl", "engine_flags": "--ranks 2"}, None)
    [directory] = locate_models([f"tiny={model}"])

    command = WorkerCommand(settings, directory)(tmp_path / "socket", 3)

    assert command[command.index("--engine") + 1] == "nemo-rl"
    assert command[-2:] == ["--ranks", "2"]
