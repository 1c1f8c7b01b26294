"""`tinker checkpoint download` and `push-hf`: a checkpoint's weights are downloaded as a PEFT adapter."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import tinker
from safetensors.numpy import load_file
from support.client.command_line import run_tinker
from support.client.sdk import adam, next_token_datum, service_client
from support.server.serve_process import API_KEY, ServedInstallation

from .conftest import MODEL


class ModelHub:
    """`files` of each repository, as bytes by name, once they were committed."""

    def __init__(self) -> None:
        self.files: dict[str, dict[str, bytes]] = {}
        self.url = ""


@contextmanager
def model_hub() -> Iterator[ModelHub]:
    hub = ModelHub()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/api/whoami-v2":
                self.answer(200, {"name": "hub-user", "type": "user"})
            else:
                self.answer(404)

        def do_HEAD(self) -> None:
            self.answer(404)

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            what = self.path.split("/")
            if self.path == "/api/repos/create":
                wanted = json.loads(body)
                repository = f"{wanted.get('organization') or 'hub-user'}/{wanted['name']}"
                hub.files[repository] = {}
                self.answer(200, {"url": f"{hub.url}/{repository}", "name": repository})
            elif self.path == "/api/validate-yaml":
                self.answer(200, {"errors": [], "warnings": []})
            elif "preupload" in what:
                names = [one["path"] for one in json.loads(body)["files"]]
                told = [{"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in names]
                self.answer(200, {"files": told})
            elif "commit" in what:
                repository, made = "/".join(what[3:5]), "0" * 40
                hub.files[repository].update(_files_of(body))
                self.answer(200, {"commitOid": made, "commitUrl": f"{hub.url}/{repository}/commit/{made}"})
            else:
                self.answer(404)

        def answer(self, status: int, content: Any = None) -> None:
            body = json.dumps(content or {"error": "no such thing"}).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _files_of(commit: bytes) -> dict[str, bytes]:
    """Return the files of a commit, which has a line of JSON for each file."""
    lines = [json.loads(line) for line in commit.splitlines()]
    files = [line["value"] for line in lines if line["key"] == "file"]
    return {one["path"]: base64.b64decode(one["content"]) for one in files}


LIMIT_SECONDS = 240.0


@pytest.fixture(scope="module")
def saved(server: ServedInstallation) -> dict[str, str]:
    """Return paths of one model's weights, by their kind."""
    with service_client(server) as client:
        model = client.create_lora_training_client(MODEL, rank=4).result()
        model.forward_backward([next_token_datum([5, 9, 2, 14])], "cross_entropy")
        model.optim_step(adam()).result()
        return {
            "training": model.save_state("ck").result().path,
            "external": model.save_weights_external("out").result().path,
        }


def adapter_in(folder: Path) -> dict[str, bytes]:
    assert json.loads((folder / "adapter_config.json").read_text())["r"] == 4
    return {name: values.tobytes() for name, values in load_file(folder / "adapter_model.safetensors").items()}


def exported(server: ServedInstallation) -> list[str]:
    """Return paths of stored exports, including those of other tests."""
    rest = tinker.RestClient(base_url=server.url, api_key=API_KEY)
    paths = [checkpoint.tinker_path for checkpoint in rest.list_user_checkpoints().result().checkpoints]
    return [path for path in paths if "/external" in path]


def test_a_training_checkpoint_and_an_external_one_are_downloaded_as_the_same_adapter(
    server: ServedInstallation, saved: dict[str, str], tmp_path: Path
) -> None:
    before = exported(server)
    for kind, path in saved.items():
        done = run_tinker("checkpoint", "download", path, "--output", str(tmp_path / kind), url=server.url, key=API_KEY)
        assert done.exit_code == 0, done.output
    folders = {kind: next((tmp_path / kind).glob("**/adapter_config.json")).parent for kind in saved}
    assert adapter_in(folders["training"]) == adapter_in(folders["external"])
    assert exported(server) == before, "what was exported for the download is gone again"


def test_a_checkpoint_is_pushed_to_a_hub(server: ServedInstallation, saved: dict[str, str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tinker.cli", "checkpoint", "push-hf", saved["external"], "--repo", "me/adapter"]
    with model_hub() as hub:
        environment = os.environ | {
            "TINKER_BASE_URL": server.url,
            "TINKER_API_KEY": API_KEY,
            "HF_ENDPOINT": hub.url,
            "HF_TOKEN": "hf_of-user",
            "HF_HOME": str(tmp_path),
            "HF_HUB_OFFLINE": "0",
        }
        done = subprocess.run(
            command, check=False, env=environment, capture_output=True, text=True, timeout=LIMIT_SECONDS
        )
        assert done.returncode == 0, done.stdout + done.stderr
        pushed = hub.files["me/adapter"]
    assert {"adapter_config.json", "adapter_model.safetensors", "README.md"} <= pushed.keys()
    assert f"tinker_path: {saved['external']}" in pushed["README.md"].decode()
