"""`tinsmith serve` and `tinsmith keys` as far as they go without a worker."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
import yaml
from tinsmith_server.cli.key_commands import keys
from tinsmith_server.cli.serving import listen, serve
from tinsmith_server.cli.tenant_commands import tenants
from tinsmith_server.errors import StartupError
from typer.testing import CliRunner, Result

app = typer.Typer()
app.command()(serve)
app.add_typer(keys, name="keys")
app.add_typer(tenants, name="tenants")


@pytest.fixture(autouse=True)
def _umask_as_before() -> Iterator[None]:
    """`tinsmith serve` makes files for its own user alone, and here it is this process."""
    before = os.umask(0o077)
    os.umask(before)
    yield
    os.umask(before)


@pytest.fixture(autouse=True)
def _no_settings_around_us(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("TINSMITH_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("TINSMITH_DATA", str(tmp_path / "data"))


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


def test_print_config_shows_the_settings_in_force_and_starts_nothing(tmp_path: Path) -> None:
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


def test_a_port_in_use_is_reported_in_one_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StartupError, match=f"port {port} on 127.0.0.1 is in use"):
            listen("127.0.0.1", port)


def test_a_key_is_made_listed_and_revoked() -> None:
    made = json.loads(run("keys", "create", "laptop", "--tenant", "lab", "--json").stdout)
    assert made["key"].startswith("tml-")
    listed = json.loads(run("keys", "list", "--json").stdout)
    assert [(key["name"], key["tenant"], key["revoked_at"]) for key in listed] == [("laptop", "lab", None)]
    assert made["key"] not in json.dumps(listed)
    assert run("keys", "revoke", str(made["key_id"])).exit_code == 0
    assert json.loads(run("keys", "list", "--tenant", "lab", "--json").stdout)[0]["revoked_at"] is not None


@pytest.mark.parametrize("tenant", ["", "..", "a/b", "a:b", "a b", "Lab", "-lab", "lab.", "l" * 65, "lab\n"])
def test_a_tenant_gets_no_key_when_its_name_is_no_folder_name(tenant: str) -> None:
    refused = run("keys", "create", "laptop", f"--tenant={tenant}")
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "is not a valid tenant name: a tenant's name has 1 to 64 small letters" in refused.stderr
    assert json.loads(run("keys", "list", "--json").stdout or "[]") == []


def test_an_impossible_database_url_is_reported_in_one_sentence() -> None:
    result = run("keys", "list", "--database-url", "mysql://x")
    assert result.exit_code == 2
    assert result.stderr.startswith("tinsmith keys: The store cannot live in 'mysql'")


@pytest.mark.parametrize("arguments", [["list"], ["revoke", "1"]], ids=["list", "revoke"])
def test_keys_of_a_directory_without_a_store_are_refused_and_no_store_is_made(
    arguments: list[str], tmp_path: Path
) -> None:
    result = run("keys", *arguments)
    assert result.exit_code == 2
    assert result.stderr == f"tinsmith keys: {tmp_path / 'data'} contains no server's data; set --data or --config\n"
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("arguments", [["create"], ["list"], ["revoke", "1"]], ids=" ".join)
def test_a_command_that_names_no_server_makes_no_store_where_it_happens_to_run(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TINSMITH_DATA")
    monkeypatch.chdir(tmp_path)
    result = run("keys", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    store = tmp_path / "tinsmith-data" / "tinsmith.db"
    assert result.stderr.startswith(
        f"tinsmith keys: there is no store {store}; set --data to the data directory of the"
    )
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_was_started_here_without_data_has_its_keys_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("keys", "create", "--data", str(tmp_path / "tinsmith-data"))
    monkeypatch.delenv("TINSMITH_DATA")
    monkeypatch.chdir(tmp_path)
    assert len(run("keys", "list").stdout.splitlines()) == 2


@pytest.mark.parametrize("place", ["/proc/none", "/sys/kernel", "{tmp}/file/data", "{tmp}/file"])
@pytest.mark.parametrize(
    "command", [["keys", "create"], ["serve", "--port", "0", "--model", "tiny={tmp}/model"]], ids=" ".join
)
def test_data_that_cannot_be_written_is_a_sentence_and_status_2(place: str, command: list[str], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    directory = place.format(tmp=tmp_path)
    result = run(*(word.format(tmp=tmp_path) for word in command), "--data", directory)
    assert result.exit_code == 2
    assert f"the data directory {directory} cannot be written: " in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_key_has_the_role_that_is_asked_for_and_the_last_admins_key_stays() -> None:
    run("keys", "create")
    run("keys", "create", "boss", "--role", "admin")
    assert [key["role"] for key in json.loads(run("keys", "list", "--json").stdout)] == ["member", "admin"]
    assert run("keys", "list").stdout.splitlines()[2].split("\t")[3] == "admin"
    assert run("keys", "create", "--role", "root").exit_code == 2
    refused = run("keys", "revoke", "2")
    assert (refused.exit_code, "last key with the role admin" in refused.stderr) == (2, True)


def test_limits_of_a_tenant_are_set_one_by_one_and_shown() -> None:
    run("keys", "create", "--tenant", "lab")
    assert run("tenants", "limit", "lab", "--adapters", "4").stdout == "tenant lab: adapters=4\n"
    run("tenants", "limit", "lab", "--requests-per-second", "2.5")
    default, lab = json.loads(run("tenants", "list", "--json").stdout)
    assert (default["tenant"], default["limits"], default["keys"]) == ("default", {}, 0)
    assert (lab["limits"], lab["keys"]) == ({"adapters": 4, "requests_per_second": 2.5}, 1)
    assert "adapters=4, requests_per_second=2.5" in run("tenants", "list").stdout
    cleared = json.loads(run("tenants", "limit", "lab", "--clear", "--checkpoints-kept", "3", "--json").stdout)
    assert cleared == {"tenant": "lab", "limits": {"checkpoints_kept": 3}}


@pytest.mark.parametrize(
    "arguments", [("lab",), ("lab", "--adapters=-1"), ("lab", "--share-weight=99"), ("../etc", "--adapters=1")]
)
def test_limits_that_are_impossible_are_refused(arguments: tuple[str, ...]) -> None:
    run("keys", "create", "--tenant", "lab")
    assert run("tenants", "limit", *arguments).exit_code == 2
    assert [one["limits"] for one in json.loads(run("tenants", "list", "--json").stdout)] == [{}, {}]


def test_a_key_without_a_readable_name_is_refused() -> None:
    result = run("keys", "create", " ")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "the name is empty" in result.stderr


def test_revoking_twice_says_so() -> None:
    run("keys", "create")
    assert run("keys", "revoke", "1").stdout == "revoked key 1\n"
    assert "was already revoked" in run("keys", "revoke", "1").stdout


def test_serve_warns_of_a_variable_that_sets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINSMITH_PROT", "8001")
    result = run("serve", "--print-config")
    assert result.exit_code == 0
    assert result.stderr == "tinsmith serve: not a setting: TINSMITH_PROT (did you mean TINSMITH_PORT?)\n"


def test_revoking_a_key_can_be_read_by_a_program_and_an_unknown_key_fails() -> None:
    run("keys", "create")
    assert json.loads(run("keys", "revoke", "1", "--json").stdout) == {"key_id": 1, "revoked": True}
    unknown = run("keys", "revoke", "77")
    assert (unknown.exit_code, unknown.stderr) == (1, "tinsmith keys: there is no key 77\n")
