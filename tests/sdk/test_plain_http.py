"""A training loop without an SDK, as in the example, on a server that was started by uvicorn's own command."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.requirements import InstalledBy, require
from support.server.serve_process import HTTP_OPTIONS, START_SECONDS, STOP_SECONDS
from support.waiting import until
from testcluster.ports import free_port
from tinsmith_trainer.torch_model.tiny_model import make_tiny_model

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "plain_http.py"
PAGE = ROOT / "docs" / "how-to" / "rest.md"


@pytest.fixture(scope="module")
def metrics_port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, metrics_port: int) -> Iterator[tuple[str, str]]:
    """Return the server's URL and the model's name. The server has no keys."""
    folder = tmp_path_factory.mktemp("plain")
    model, port = str(make_tiny_model(folder / "model")), free_port()
    names = {
        "TRAINING_PORT": str(port),
        "SUPPORTED_MODELS": json.dumps([{"model_name": model, "max_context_length": 512, "supports_lora": True}]),
        "METADATA_DIR": str(folder / "data"),
        "TINSMITH_REQUIRE_KEYS": "false",
        "TINSMITH_METRICS_PORT": str(metrics_port),
        "TINSMITH_LOG_LEVEL": "warning",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, "-m", "uvicorn", "tinsmith_server.asgi:app", "--port", str(port), "--no-access-log"]
    process = subprocess.Popen(command, env={**os.environ, **names}, stderr=subprocess.PIPE, text=True)
    try:
        url = f"http://127.0.0.1:{port}"
        until(lambda: _answers(url, process), START_SECONDS)
        yield url, model
    finally:
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=STOP_SECONDS)
    assert "TRAINING_PORT as port" in said
    assert "keys are off" in said
    assert "shown only this once" not in said


def _answers(url: str, process: subprocess.Popen[str]) -> bool:
    assert process.poll() is None, process.communicate()[1]
    try:
        return httpx.get(f"{url}/health", **HTTP_OPTIONS).status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.timeout(300)
def test_the_example_trains_and_samples(server: tuple[str, str]) -> None:
    url, model = server
    environment = {**os.environ, "TINKER_BASE_URL": url, "NO_PROXY": "*"}
    done = subprocess.run(
        [sys.executable, EXAMPLE, "--model", model], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    first, last = (float(word) for word in done.stdout.split() if word.replace(".", "").isdecimal() and "." in word)
    assert last < first / 2
    assert "sample: [12, 13, 14, 15, 16, 17, 18]" in done.stdout


def test_the_walk_by_curl_trains_and_samples_as_the_page_has_it(server: tuple[str, str]) -> None:
    for program in ("bash", "curl", "jq"):
        require(shutil.which(program) is not None, f"{program} is not installed.", InstalledBy.DEBIAN_PACKAGES)
    url, model = server
    [walk] = re.findall(r"```bash\n(.*?)```", PAGE.read_text(), re.DOTALL)
    typed = walk.replace("http://127.0.0.1:8000", url).replace("demo/tiny", model).replace("tml-…", "tml-any")
    command = ["bash", "-e", "-u", "-o", "pipefail", "-c", typed]
    environment = {**os.environ, "NO_PROXY": "*", "no_proxy": "*"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    made, trained, _stepped, sampled, _deleted = json_values(done.stdout)
    assert made["model_id"].endswith(":train:0")
    assert trained["metrics"]["loss:sum"] > 0
    assert (len(sampled), all(isinstance(token, int) for token in sampled)) == (4, True)


def json_values(text: str) -> list[Any]:
    """Return the consecutive JSON values of a text."""
    values, decoder, text = [], json.JSONDecoder(), text.strip()
    while text:
        value, end = decoder.raw_decode(text)
        values.append(value)
        text = text[end:].strip()
    return values


def test_without_keys_every_proxy_is_refused(server: tuple[str, str]) -> None:
    answer = httpx.get(f"{server[0]}/health", headers={"X-Forwarded-For": "127.0.0.1"}, **HTTP_OPTIONS)
    assert (answer.status_code, "through a proxy" in answer.json()["detail"]) == (403, True)
