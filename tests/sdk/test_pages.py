"""Commands and programs of pages in docs/, typed as they stand there; only their placeholders are filled in."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent

import pytest
import tinker
from safetensors.numpy import load_file
from support.client.command_line import run_tinker
from support.client.sdk import adam, next_token_datum, service_client
from support.server.serve_process import API_KEY, REFERENCE_ENGINE, REFERENCE_MODEL, ServedInstallation
from tinsmith.cli import main
from tinsmith_trainer.torch_model.tiny_model import make_tiny_model

from .conftest import MODEL

DOCS = Path(__file__).parents[2] / "docs"
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
DATA = [next_token_datum([5, 9, 2, 14, 7, 11, 3, 8])]
RANK = 4


def block(page: str, *, containing: str) -> str:
    """Return the one block of a page that has this text."""
    [found] = [dedent(code) for _, _, code in FENCE.findall((DOCS / page).read_text()) if containing in code]
    return found


def filled(text: str, places: Mapping[str, str]) -> str:
    for place, value in places.items():
        assert place in text
        text = text.replace(place, value)
    return text


@dataclass(frozen=True, slots=True)
class Reader:
    """A user who types lines of a page in a folder. `tinker` and `tinsmith` run in this process: each takes seconds to
    start."""

    server: ServedInstallation
    monkeypatch: pytest.MonkeyPatch
    capsys: pytest.CaptureFixture[str]

    def sits_in(self, folder: Path) -> Reader:
        self.monkeypatch.chdir(folder)
        self.monkeypatch.setenv("TINKER_BASE_URL", self.server.url)
        self.takes_key(API_KEY)
        return self

    def takes_key(self, key: str) -> None:
        self.monkeypatch.setenv("TINKER_API_KEY", key)

    def types(self, lines: str) -> str:
        """Return what they print. Each must succeed."""
        return "".join(self._type(shlex.split(line, comments=True)) for line in lines.splitlines())

    def _type(self, words: list[str]) -> str:
        program, *arguments = words
        if program == "tinker":
            done = run_tinker(*arguments, url=self.server.url, key=os.environ["TINKER_API_KEY"])
            assert done.exit_code == 0, done.output
            return done.stdout
        assert program == "tinsmith"
        self.capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        said = self.capsys.readouterr()
        assert ended.value.code == 0, said
        return said.out

    def runs(self, program: str) -> str:
        """Return what a program in Python prints."""
        self.capsys.readouterr()
        exec(compile(program, "program of the page", "exec"), {})
        return self.capsys.readouterr().out


@pytest.fixture
def reader(
    server: ServedInstallation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Reader:
    return Reader(server, monkeypatch, capsys).sits_in(tmp_path)


def trained(server: ServedInstallation, model: str = MODEL, key: str = API_KEY) -> tuple[str, str]:
    """Return the paths of a training checkpoint and a sampler of a model that was trained for one step."""
    with service_client(server, api_key=key) as service:
        client = service.create_lora_training_client(model, rank=RANK).result()
        client.forward_backward(DATA, "cross_entropy").result()
        client.optim_step(adam()).result()
        return client.save_state("last").result().path, client.save_weights_for_sampler("last").result().path


def names_of(path: str) -> dict[str, str]:
    run, _, name = path.removeprefix("tinker://").split("/")
    return {"RUN": run, "NAME": name}


def paths_of(server: ServedInstallation, key: str = API_KEY) -> set[str]:
    listed = tinker.RestClient(base_url=server.url, api_key=key).list_user_checkpoints().result()
    return {checkpoint.tinker_path for checkpoint in listed.checkpoints}


def test_checkpoints_of_a_run_are_deleted_as_the_page_says(reader: Reader) -> None:
    path, sampler = trained(reader.server)
    reader.types(filled(block("deleting.md", containing="--run-id RUN"), names_of(path)))
    assert paths_of(reader.server).isdisjoint({path, sampler})


def test_a_tenant_is_deleted_as_the_page_says_and_others_keep_what_they_have(reader: Reader) -> None:
    server, page = reader.server, "deleting.md"
    others = set(trained(server))
    key = reader.types(f"tinsmith keys create loop --tenant research --data {server.data}").strip()
    reader.takes_key(key)
    reader.types(f"tinsmith promote greeter {trained(server, key=key)[1]}")
    [listed] = json.loads(reader.types(f"tinsmith keys list --tenant research --data {server.data} --json"))
    places = {"DIR": str(server.data), "NUMBER": str(listed["key_id"])}
    reader.types(filled(block(page, containing="keys revoke"), places))
    exported = re.fullmatch(r"export TINKER_API_KEY=\$\((.+)\)\n", block(page, containing="keys create"))
    assert exported is not None
    new_key = reader.types(filled(exported[1], {"DIR": str(server.data)})).strip()
    reader.takes_key(new_key)
    assert reader.runs(block(page, containing="import httpx")) == "2 checkpoints deleted\n"
    assert reader.runs(block(page, containing="import httpx")) == "0 checkpoints deleted\n"
    assert paths_of(server, new_key) == set()
    assert others <= paths_of(server)
    [first, _] = json.loads(reader.types(f"tinsmith keys list --tenant research --data {server.data} --json"))
    assert first["revoked_at"] is not None


# peft calls transformers
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_an_adapter_is_downloaded_imported_and_exported_as_the_page_says(reader: Reader) -> None:
    server, page, path = reader.server, "from-hosted-tinker.md", trained(reader.server)[0]
    Path(MODEL).parent.mkdir()
    Path(MODEL).symlink_to(server.models[MODEL])
    reader.types(filled(block(page, containing="checkpoint download"), names_of(path)))
    imported = reader.types(filled(block(page, containing="tinsmith import"), names_of(path))).strip()
    assert imported in paths_of(server)
    places = {**names_of(path), "PATH": str(server.models[MODEL])}
    reader.types(filled(block(page, containing="tinsmith export"), places))
    assert Path("model/config.json").is_file()
    [downloaded] = Path("downloads").glob("*/adapter_model.safetensors")
    before, after = load_file(downloaded), load_file("adapter/adapter_model.safetensors")
    assert {name: tensor.tobytes() for name, tensor in before.items()} == {
        name: tensor.tobytes() for name, tensor in after.items()
    }


def test_the_sizes_of_the_page_are_those_of_saved_checkpoints(reader: Reader) -> None:
    training, sampler = trained(reader.server)
    config = reader.server.models[MODEL] / "config.json"
    reader.monkeypatch.setattr(sys, "argv", ["sizes.py", str(config), str(RANK)])
    said = reader.runs(block("sizing.md", containing="import json"))
    sizes = {name: float(size) * 1e6 for name, size in re.findall(r"^(.+): ([\d.]+) MB$", said, re.MULTILINE)}
    listed = tinker.RestClient(base_url=reader.server.url, api_key=API_KEY).list_user_checkpoints().result()
    saved = {checkpoint.tinker_path: checkpoint.size_bytes for checkpoint in listed.checkpoints}
    headers_and_rounding = 12_000
    assert saved[training] == pytest.approx(sizes["training checkpoint"], abs=headers_and_rounding)
    assert saved[sampler] == pytest.approx(sizes["sampler checkpoint"], abs=headers_and_rounding)


@pytest.fixture
def stopped_and_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Reader]:
    """A reader of a server that may be stopped, with an engine that starts at once."""
    models = {REFERENCE_MODEL: make_tiny_model(tmp_path / "model")}
    server = ServedInstallation(tmp_path / "data", models, {"engine": REFERENCE_ENGINE})
    yield Reader(server.start(), monkeypatch, capsys).sits_in(tmp_path)
    server.stop()


def types_with_systemctl(reader: Reader, script: str) -> None:
    """Type a block of the page, in which `systemctl` stands for the reader's server."""
    first, *between, last = filled(script, {"/var/lib/tinsmith": str(reader.server.data.parent)}).splitlines()
    assert (first, last) == ("systemctl stop tinsmith", "systemctl start tinsmith")
    reader.server.stop()
    subprocess.run(["bash", "-ec", "\n".join(between)], check=True)
    reader.server.start()


def test_a_restored_backup_has_the_keys_and_checkpoints_of_its_time(stopped_and_started: Reader) -> None:
    reader, server = stopped_and_started, stopped_and_started.server
    key = reader.types(f"tinsmith keys create laptop --data {server.data}").strip()
    reader.takes_key(key)
    of_its_time = trained(server, REFERENCE_MODEL, key)
    types_with_systemctl(reader, block("single-machine.md", containing="tar --create"))
    trained(server, REFERENCE_MODEL, key)
    reader.types(f"tinker checkpoint delete --yes {of_its_time[0]}")
    types_with_systemctl(reader, block("single-machine.md", containing="tar --extract"))
    assert paths_of(server, key) == set(of_its_time)
    with service_client(server, api_key=key) as service:
        resumed = service.create_training_client_from_state_with_optimizer(of_its_time[0]).result()
        resumed.forward_backward(DATA, "cross_entropy").result()
        resumed.optim_step(adam()).result()
