"""The tokenizer of a base model, on a machine that has only the SDK and an address."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import tinker
from support.server.serve_process import API_KEY, ServedInstallation
from tinsmith.base_models import load_tokenizer
from tinsmith.local_server import tinsmith_command
from tinsmith.training.evaluation.examples import Example
from tinsmith.training.evaluation.tasks import Task
from transformers import AutoTokenizer

PRIVATE = "tiny/other-name"
TEXT = "<|im_start|>user\nHi 12+3<|im_end|>"
PROGRAM = """
import os, sys, tinker
client = tinker.ServiceClient().create_sampling_client(base_model=sys.argv[1])
print(client.get_tokenizer().encode(sys.argv[2]))
"""


@pytest.fixture(autouse=True)
def elsewhere(server: ServedInstallation, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TINKER_BASE_URL", server.url)
    monkeypatch.setenv("TINKER_API_KEY", API_KEY)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


def test_the_unmodified_sdk_finds_the_fetched_tokenizer_without_a_hub(server: ServedInstallation) -> None:
    subprocess.run([*tinsmith_command(), "tokenizer", PRIVATE], check=True, capture_output=True)
    assert Path(PRIVATE, "tokenizer.json").is_file()
    assert not list(Path(PRIVATE).glob("*.safetensors"))
    online = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    with socket.create_server(("127.0.0.1", 0)) as hub:
        online["HF_ENDPOINT"] = f"http://127.0.0.1:{hub.getsockname()[1]}"
        command = [sys.executable, "-c", PROGRAM, PRIVATE, TEXT]
        done = subprocess.run(command, env=online, check=True, capture_output=True, text=True)
        hub.setblocking(False)
        with pytest.raises(BlockingIOError):
            hub.accept()
    assert done.stdout.strip() == str(AutoTokenizer.from_pretrained(server.models[PRIVATE]).encode(TEXT))


def test_commands_load_the_servers_tokenizer_by_themselves(
    server: ServedInstallation, client: tinker.ServiceClient
) -> None:
    wanted = AutoTokenizer.from_pretrained(server.models[PRIVATE])
    found = load_tokenizer(PRIVATE, server.url, API_KEY)
    assert found is not None
    assert (found.encode(TEXT), found.chat_template) == (wanted.encode(TEXT), wanted.chat_template)
    task = Task("sums", [Example(prompt="1+1", id="a")], lambda *_: 1.0)
    sampler = client.create_sampling_client(base_model=PRIVATE).result()
    assert task._find_tokenizer(sampler).encode(TEXT) == wanted.encode(TEXT)
    assert os.listdir() == []
