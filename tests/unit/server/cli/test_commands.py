"""`tinsmith serve` and `tinsmith keys` as far as they go without a worker."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
import typer
import yaml
from tinsmith_server.cli.key_commands import keys
from tinsmith_server.cli.serving import listen, serve
from tinsmith_server.errors import StartupError
from tinsmith_server.settings import Settings
from typer.testing import CliRunner, Result

app = typer.Typer()
app.command()(serve)
app.add_typer(keys, name="keys")


@pytest.fixture(autouse=True)
def _no_settings_around_us(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in Settings.model_fields:
        monkeypatch.delenv(f"TINSMITH_{name.upper()}", raising=False)
    monkeypatch.setenv("TINSMITH_DATA", str(tmp_path / "data"))


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


def test_print_config_shows_what_is_in_force_and_starts_nothing(tmp_path: Path) -> None:
    result = run("serve", "--model", "a=b", "--model", "c=d", "--port", "0", "--print-config")
    assert result.exit_code == 0
    assert yaml.safe_load(result.stdout)["models"] == ["a=b", "c=d"]
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "no model to serve"),
        (["--model", "a=/nowhere/at/all"], "/nowhere/at/all does not exist"),
        (["--port", "70000"], "port"),
        (["--config", "/nowhere.yaml"], "cannot read the configuration file"),
    ],
    ids=["no-model", "no-directory", "port", "no-file"],
)
def test_serve_refuses_with_one_line_and_status_2(arguments: list[str], sentence: str) -> None:
    result = run("serve", *arguments)
    assert result.exit_code == 2
    assert sentence in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert result.stdout == ""


def test_a_port_in_use_is_said_in_a_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StartupError, match=f"port {port} on 127.0.0.1 is in use"):
            listen("127.0.0.1", port)


def test_answers_are_not_held_back_by_nagle() -> None:
    with listen("127.0.0.1", 0) as listener:
        assert listener.proto == socket.IPPROTO_TCP


def test_port_0_takes_a_free_one() -> None:
    with listen("127.0.0.1", 0) as listener:
        assert listener.getsockname()[1] > 0


def test_a_key_is_made_listed_and_revoked() -> None:
    made = json.loads(run("keys", "create", "laptop", "--tenant", "lab", "--json").stdout)
    assert made["key"].startswith("tml-")
    listed = json.loads(run("keys", "list", "--json").stdout)
    assert [(key["name"], key["tenant"], key["revoked_at"]) for key in listed] == [("laptop", "lab", None)]
    assert made["key"] not in json.dumps(listed)
    assert run("keys", "revoke", str(made["key_id"])).exit_code == 0
    assert json.loads(run("keys", "list", "--tenant", "lab", "--json").stdout)[0]["revoked_at"] is not None


def test_a_key_is_printed_alone_for_a_shell() -> None:
    assert run("keys", "create").stdout.strip().startswith("tml-")
    assert "active" in run("keys", "list").stdout


def test_revoking_an_unknown_key_fails() -> None:
    result = run("keys", "revoke", "77")
    assert (result.exit_code, result.stderr) == (1, "tinsmith keys: there is no key 77\n")


def test_a_database_that_cannot_be_is_said_in_a_sentence() -> None:
    result = run("keys", "list", "--database-url", "mysql://x")
    assert result.exit_code == 2
    assert result.stderr.startswith("tinsmith keys: The store cannot live in 'mysql'")
