"""The vendor's command line with this server: `tinker auth`, models, runs and checkpoints."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tinker
from click.testing import Result
from support.client.command_line import run_tinker
from support.server.attacked_server import PROGRAM
from support.server.serve_process import API_KEY, ServedInstallation
from tinker.types import SessionSearchRequest
from tinsmith_trainer.torch_model.tiny_model import make_tiny_model

from .conftest import MODEL


@dataclass(frozen=True, slots=True)
class Shell:
    """A shell of a user with their own home folder."""

    url: str
    home: Path

    def run(self, *arguments: str, key: str | None = API_KEY, typed: str = "") -> Result:
        return run_tinker(*arguments, url=self.url, key=key, home=self.home, typed=typed)

    def read(self, *arguments: str) -> Any:
        """Return the JSON that the command prints."""
        done = self.run("--format", "json", *arguments)
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)


@pytest.fixture(scope="module")
def installation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedInstallation]:
    """Start a server; no test here computes anything."""
    folder = tmp_path_factory.mktemp("served")
    model = make_tiny_model(folder / "model")
    served = ServedInstallation(folder / "data", {MODEL: model}, {"token_exchange": "true"}, program=PROGRAM)
    yield served.start()
    served.stop()


@pytest.fixture
def shell(installation: ServedInstallation, tmp_path: Path) -> Shell:
    return Shell(installation.url, tmp_path)


def test_commands_use_a_pasted_key(shell: Shell) -> None:
    login = shell.run("auth", "login", key=None, typed=f"{API_KEY}\n")
    assert "Logged in as default (default)" in login.output
    assert "yes" in shell.run("auth", "status", key=None).stdout
    assert shell.run("auth", "logout", key=None).exit_code == 0
    assert shell.run("auth", "status", key=None).exit_code != 0


def test_a_wrong_key_is_reported(shell: Shell) -> None:
    login = shell.run("auth", "login", key=None, typed="tml-unknown\n")
    assert login.exit_code != 0
    assert "unknown or revoked API key" in repr(vars(login.exception))


def test_a_key_shows_its_owner(shell: Shell) -> None:
    told = shell.read("auth", "whoami")
    assert (told["user_urn"], told["org_urn"]) == ("tinsmith:tenant:default", "tml:organization:default")


def test_models_runs_and_checkpoints_are_listed(shell: Shell, installation: ServedInstallation) -> None:
    session = installation.post("/api/v1/create_session", {"tags": [], "user_metadata": {}, "sdk_version": "0"}).json()
    body = {"session_id": session["session_id"], "model_seq_id": 0, "base_model": MODEL, "lora_config": {"rank": 4}}
    run = installation.retrieve(installation.post("/api/v1/create_model", body).json()["request_id"]).json()["model_id"]
    save = installation.post("/api/v1/save_weights", {"model_id": run, "seq_id": 1, "path": "ck"}).json()
    path = installation.retrieve(save["request_id"]).json()["path"]
    assert MODEL in json.dumps(shell.read("model", "list"))
    assert run in json.dumps(shell.read("run", "list"))
    assert run in json.dumps(shell.read("run", "info", run))
    assert path in json.dumps(shell.read("checkpoint", "list", "--run-id", run))
    assert shell.run("checkpoint", "publish", path).exit_code == 0
    assert shell.read("checkpoint", "info", path)["public"] is True
    assert shell.run("checkpoint", "unpublish", path).exit_code == 0
    assert shell.read("checkpoint", "info", path)["public"] is False
    assert shell.run("checkpoint", "set-ttl", path, "--ttl", "7200").exit_code == 0
    assert shell.run("checkpoint", "delete", path, "--yes").exit_code == 0
    assert path not in json.dumps(shell.read("checkpoint", "list", "--run-id", run))


@pytest.mark.filterwarnings("ignore::tinker.ExperimentalWarning")
def test_sessions_are_searched_and_moved_by_the_sdk(installation: ServedInstallation) -> None:
    body = {"tags": [], "user_metadata": {}, "sdk_version": "0", "display_name": "to be found"}
    session_id = installation.post("/api/v1/create_session", body).json()["session_id"]
    rest = tinker.RestClient(base_url=installation.url, api_key=API_KEY)
    rest.assign_session_project(session_id, "there").result()
    (found,) = rest.search_sessions(SessionSearchRequest(display_name="found", project_ids=["there"])).result().sessions
    assert (found.session_id, found.project_id, found.checkpoints_count) == (session_id, "there", 0)


@pytest.mark.filterwarnings("ignore::tinker.ExperimentalWarning")
def test_only_owned_runs_are_accessible_and_runs_are_listed_by_project(installation: ServedInstallation) -> None:
    session = {"tags": [], "user_metadata": {}, "sdk_version": "0", "project_id": "of-runs"}
    session_id = installation.post("/api/v1/create_session", session).json()["session_id"]
    model = {"session_id": session_id, "model_seq_id": 0, "base_model": MODEL, "lora_config": {"rank": 4}}
    made = installation.retrieve(installation.post("/api/v1/create_model", model).json()["request_id"])
    rest = tinker.RestClient(base_url=installation.url, api_key=API_KEY)
    for scope in ("owned", "accessible"):
        runs = rest.list_training_runs(access_scope=scope, project_id="of-runs").result()
        assert [run.training_run_id for run in runs.training_runs] == [made.json()["model_id"]]
        assert rest.list_training_runs(access_scope=scope, project_id="unknown-project").result().training_runs == []
        assert rest.get_training_run(made.json()["model_id"], access_scope=scope).result().base_model == MODEL
        assert session_id in rest.list_sessions(access_scope=scope).result().sessions
        assert rest.get_session(session_id, access_scope=scope).result().training_run_ids == [made.json()["model_id"]]
