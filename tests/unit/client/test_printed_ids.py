"""Ids and paths are printed unchanged: by default, Rich reads `:train:` as an emoji and brackets as a style."""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path
from urllib.parse import quote

import pytest
from support.client.stub_server import GOOD_KEY, WELL, stub_server
from tinsmith.cli import find_commands, main

pytestmark = pytest.mark.pytorch

ROOT = Path(__file__).parents[3]
FACTORIES = ("client/tinsmith/console.py", "trainer_image/tinsmith_trainer/process/output.py")
PROGRAMS = ("api_server", "client", "operator", "rpc", "dev/scripts", "trainer_image")
ID = "sess-nope:train:0[red]"
ANSWERS = {
    **WELL,
    "/oai/api/v1/chat/completions": (404, {"error": {"message": f"there is no model {ID}"}}),
    "/api/v1/create_session": (422, {"detail": f"there is no room for {ID}"}),
    "/api/v1/get_server_capabilities": (200, {"supported_models": [{"model_name": ID}]}),
    "/api/v1/waiting_models": (200, {"waiting_models": [{"model_id": ID, "waiting_seconds": 1, "reason": ID}]}),
    "/api/v1/training_runs?limit=20": (
        200,
        {"training_runs": [{"training_run_id": ID, "base_model": ID, "state": "ready"}]},
    ),
    f"/api/v1/models/{quote(ID)}/tokenizer": (404, {"detail": f"there is no base model {ID}"}),
    f"/api/v1/promotions/{ID}": (404, {"detail": f"you have no promoted name {ID}"}),
    "/api/v1/promotions": (
        200,
        {
            "promotions": [
                {"name": ID, "model_path": ID, "time": "2026-01-01T00:00:00Z", "number": 1, "is_rollback": False}
            ]
        },
    ),
}
COMMANDS = {
    "chat": [ID, "--message", "Hello"],
    "checkpoints": ["show", ID, "3"],
    "cluster": ["status", "--context", ID],
    "demo": ["--out", f"kubectl/{ID}"],
    "doctor": [],
    "eval": ["compare", ID, "another"],
    "export": [f"tinker://{ID}/weights/a", "--to", "out", "--layout", "peft"],
    "import": [ID, "--base-model", ID],
    "keys": ["list", "--data", ID],
    "make-tiny-model": [f"kubectl/{ID}"],
    "models": [],
    "parity": ["--engine", f"module:{ID}", "--engine", "peft", "--model", ID],
    "promote": ["--list"],
    "runs": [],
    "serve": ["--config", ID],
    "tenants": ["list", "--data", ID],
    "tokenizer": [ID],
    "train": ["sft", "--model", ID, "--data", ID],
}
KUBECTL = """#!/bin/sh
echo "there is no context $*" >&2
exit 1
"""
PRINT_NO_ID = {"version"}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_prints_an_id_as_it_is(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TINKER_API_KEY", GOOD_KEY)
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    (tmp_path / "kubectl").write_text(KUBECTL)
    (tmp_path / "kubectl").chmod(0o755)
    with stub_server(ANSWERS) as url:
        monkeypatch.setenv("TINKER_BASE_URL", url)
        with pytest.raises(SystemExit):
            main([command, *COMMANDS[command]])
    shown = capsys.readouterr()
    assert ID in shown.out + shown.err


def test_no_command_is_left_out() -> None:
    assert COMMANDS.keys() | PRINT_NO_ID == find_commands().keys()


@pytest.mark.parametrize("command", find_commands())
def test_help_has_no_emoji_either(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    assert not re.search("[\U0001f000-\U0001ffff]", capsys.readouterr().out)


def test_consoles_are_made_in_one_place() -> None:
    """Rich's own default console, and `print`, are consoles as well."""
    files = [file for program in PROGRAMS for file in sorted((ROOT / program).rglob("*.py"))]
    contents = {f"{file.relative_to(ROOT)}": file.read_text() for file in files}
    found = {name for name, content in contents.items() if "rich" in content and makes_a_console(ast.parse(content))}
    assert found == set(FACTORIES)


@pytest.mark.parametrize(
    "source", ["Console(emoji=False)", "console.Console()", "get_console()", "from rich import print", "rich.print(1)"]
)
def test_each_way_to_a_console_is_recognised(source: str) -> None:
    assert makes_a_console(ast.parse(source))


def makes_a_console(tree: ast.Module) -> bool:
    calls = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    imported = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "rich"
        for alias in node.names
    }
    ends = {call.rpartition(".")[2] for call in calls}
    return bool(ends & {"Console", "get_console"} or calls & {"rich.print", "track"} or imported & {"print"})


def test_a_program_for_people_to_copy_turns_emoji_off() -> None:
    tree = ast.parse((ROOT / "examples" / "first_steps.py").read_text())
    made = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "Console"]
    assert made
    assert all("emoji=False" in ast.unparse(call) for call in made)
