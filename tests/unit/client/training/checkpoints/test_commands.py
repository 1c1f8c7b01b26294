"""`tinsmith checkpoints` with an in-memory server."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.client.checkpoints.fake_server import FakeModel, FakeServer
from tinsmith.cli import main
from tinsmith.training import CheckpointManager
from tinsmith.training.checkpoints import commands
from tinsmith.training.checkpoints import manager as manager_module

pytestmark = pytest.mark.pytorch

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> FakeServer:
    server = FakeServer()
    monkeypatch.setattr(manager_module, "ServerStates", server)
    monkeypatch.setattr(commands, "_server", server.of)
    return server


@pytest.fixture
def root(server: FakeServer, tmp_path: Path) -> Path:
    """Create three steps, of which the second has the smallest loss."""
    model: Any = FakeModel(server)
    with CheckpointManager(tmp_path / "run", server, config={"lr": 0.01}) as manager:  # type: ignore[arg-type]
        for step, loss in ((10, 0.5), (20, 0.25), (30, float("nan"))):
            model.train(step)
            manager.save(model, step, loop_state={"batch": step}, metrics={"loss": loss})
    return tmp_path / "run"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def run(command: str, *words: object) -> tuple[int, str, str]:
        """Return exit status, standard output, standard error."""
        with pytest.raises(SystemExit) as end:
            main(["checkpoints", command, *map(str, words)])
        shown = capsys.readouterr()
        return int(end.value.code or 0), shown.out, shown.err

    return run


def test_list_shows_steps_and_metrics_and_names_damage(run: Run, root: Path) -> None:
    (root / "step-000010" / "metadata.json").write_text("{}")
    status, shown, said = run("list", root)
    assert status == 0
    assert [line.split()[0] for line in shown.splitlines()] == ["step", "20", "30"]
    assert "loss 0.25" in shown
    assert "step 10 is damaged" in said
    listed = json.loads(run("list", root, "--json")[1])
    assert [one["step"] for one in listed["checkpoints"]] == [20, 30]
    assert [one["metrics"] for one in listed["checkpoints"]] == [{"loss": 0.25}, {"loss": "nan"}]
    assert listed["damaged"] == [10]


def test_show_has_the_place_in_the_data_and_the_config(run: Run, root: Path) -> None:
    status, shown, _ = run("show", root, 20)
    assert status == 0
    assert "{'batch': 20}" in shown
    assert "lr: 0.01" in shown
    described = json.loads(run("show", root, 20, "--json")[1])
    assert (described["loop_state"], described["config"]) == ({"batch": 20}, "lr: 0.01\n")
    assert run("show", root, 21) == (1, "", f"tinsmith checkpoints: there is no checkpoint of step 21 in {root}\n")


def test_verify_fails_for_a_damaged_file(run: Run, root: Path) -> None:
    assert run("verify", root)[0] == 0
    (root / "step-000020" / "config.yaml").write_text("lr: 0.02\n")
    status, shown, _ = run("verify", root)
    assert status == 1
    assert "config.yaml differs from what was written" in shown.replace("\n", "")
    assert run("verify", root, 30)[0] == 0
    verified = json.loads(run("verify", root, "--json")[1])["checkpoints"]
    assert [(one["step"], one["whole"]) for one in verified] == [(10, True), (20, False), (30, True)]


def test_a_mistyped_folder_is_not_reported_as_a_complete_run(run: Run, tmp_path: Path) -> None:
    message = f"tinsmith checkpoints: there are no checkpoints in {tmp_path / 'typo'}\n"
    assert run("verify", tmp_path / "typo") == (1, "", message)
    assert run("list", tmp_path / "typo") == (0, "", message)


def test_verify_names_truncated_files(run: Run, root: Path) -> None:
    (root / ".writing-step-000040").mkdir()
    assert ".writing-step-000040 is incomplete" in run("verify", root)[2]


def test_prune_removes_checkpoints_that_no_rule_keeps(run: Run, root: Path, server: FakeServer) -> None:
    rules = ("--keep-last", 1, "--keep-best", 1, "--metric", "loss")
    assert json.loads(run("prune", root, *rules, "--dry-run", "--json")[1]) == {"removed": [10], "dry_run": True}
    assert (root / "step-000010").exists()
    status, shown, said = run("prune", root, *rules)
    assert (status, shown) == (0, f"removed {root}/step-000010\n")
    assert "its state stays on the server: tinker://" in said
    assert sorted(path.name for path in root.iterdir()) == ["step-000020", "step-000030"]
    assert len(server.states) == 3


def test_prune_deletes_states_on_the_server_only_on_request(run: Run, root: Path, server: FakeServer) -> None:
    assert run("prune", root, "--keep-last", 1, "--delete-states")[0] == 0
    assert list(server.states.values()) == [bytes([10, 20, 30])]


def test_contradictory_rules_of_prune_are_a_misuse(run: Run, root: Path) -> None:
    status, _, said = run("prune", root, "--keep-last", 1, "--keep-best", 1)
    assert status == 2
    assert "keep_best" in said


def test_export_makes_an_adapter_of_the_newest_or_any(run: Run, root: Path, tmp_path: Path) -> None:
    assert run("export", root, "--to", tmp_path / "newest")[0] == 0
    assert (tmp_path / "newest" / "adapter_model.safetensors").read_bytes() == bytes([10, 20, 30])
    made = json.loads(run("export", root, 10, "--to", tmp_path / "ten", "--json")[1])
    assert made["files"] == ["adapter_config.json", "adapter_model.safetensors", "tokenizer.json"]
    assert json.loads((tmp_path / "ten" / "adapter_config.json").read_text()) == {"r": 8}
    assert (tmp_path / "ten" / "adapter_model.safetensors").read_bytes() == bytes([10])
    assert run("export", root, "--to", tmp_path / "ten")[2] == f"tinsmith checkpoints: {tmp_path}/ten exists already\n"


def test_resume_says_from_where_and_by_which_lines(run: Run, root: Path, server: FakeServer) -> None:
    status, shown, _ = run("resume", root)
    assert status == 0
    assert f"step 30, {{'batch': 30}}, from {root}/step-000030" in shown
    assert f"manager = CheckpointManager({str(root)!r}, service, config=config)" in shown
    said = json.loads(run("resume", root, 20, "--json")[1])
    assert (said["step"], said["loop_state"], said["asked"]) == (20, {"batch": 20}, True)
    server.states.clear()
    assert run("resume", root)[0] == 1
    assert json.loads(run("resume", root, "--offline", "--json")[1])["asked"] is False


def test_a_resume_without_a_checkpoint_is_one_sentence(run: Run, tmp_path: Path) -> None:
    assert run("resume", tmp_path) == (1, "", f"tinsmith checkpoints: there is no whole checkpoint in {tmp_path}\n")
