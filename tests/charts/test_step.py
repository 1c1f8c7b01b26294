"""The program of `helm test`, against a real server."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
from support.kubernetes.charts import CHART
from support.server.serve_process import API_KEY, ServedInstallation
from testcluster.ports import free_port
from tinsmith_trainer.torch_model.tiny_model import make_tiny_model

SCRIPT = (CHART / "files" / "helm_test.py").read_text()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedInstallation]:
    folder = tmp_path_factory.mktemp("served")
    installation = ServedInstallation(folder / "data", {"demo/tiny": make_tiny_model(folder / "model")})
    installation.start()
    yield installation
    installation.stop()


def take_step(url: str, **changes: str) -> subprocess.CompletedProcess[str]:
    told = {"BASE_URL": url, "API_KEY": API_KEY, "BASE_MODEL": "", "TIMEOUT_SECONDS": "60", "NO_PROXY": "*"}
    environment = {**os.environ, **told, **changes}
    command = [sys.executable, "-c", SCRIPT]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_a_step_through_the_server_lowers_the_loss(server: ServedInstallation) -> None:
    done = take_step(server.url)
    assert done.returncode == 0, done.stderr
    assert f"training demo/tiny at {server.url}/api/v1" in done.stdout
    assert "one step took the loss from" in done.stdout


def test_a_model_that_is_not_served_is_named(server: ServedInstallation) -> None:
    done = take_step(server.url, BASE_MODEL="demo/absent")
    assert done.returncode != 0
    assert "demo/absent" in done.stderr


def test_a_wrong_key_fails_the_test(server: ServedInstallation) -> None:
    done = take_step(server.url, API_KEY="tml-wrong")
    assert done.returncode != 0
    assert "get_server_capabilities answered 401" in done.stderr


def test_a_server_that_cannot_be_reached_is_named() -> None:
    unused = f"http://127.0.0.1:{free_port()}"
    done = take_step(unused, BASE_MODEL="demo/tiny")
    assert done.returncode != 0
    assert f"cannot reach {unused}" in done.stderr
