"""Commands and programs in docs/ run as printed, with only their placeholders replaced."""

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
    """Return the only code block of a page that contains a text."""
    [found] = [dedent(code) for _, _, code in FENCE.findall((DOCS / page).read_text()) if containing in code]
    return found


def fill_in(text: str, places: Mapping[str, str]) -> str:
    for place, value in places.items():
        assert place in text
        text = text.replace(place, value)
    return text


@dataclass(frozen=True, slots=True)
class Reader:
    """A user who types commands of a page.

    `tinker` and `tinsmith` run in this process, since each takes seconds to start.
    """

    server: ServedInstallation
    monkeypatch: pytest.MonkeyPatch
    capsys: pytest.CaptureFixture[str]

    def enter(self, folder: Path) -> Reader:
        self.monkeypatch.chdir(folder)
        self.monkeypatch.setenv("TINKER_BASE_URL", self.server.url)
        self.use_key(API_KEY)
        return self

    def use_key(self, key: str) -> None:
        self.monkeypatch.setenv("TINKER_API_KEY", key)

    def type_lines(self, lines: str) -> str:
        """Return the output of the commands, each of which must succeed."""
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

    def run_program(self, program: str) -> str:
        """Return the output of a Python program."""
        self.capsys.readouterr()
        exec(compile(program, "program of the page", "exec"), {})
        return self.capsys.readouterr().out


@pytest.fixture
def reader(
    server: ServedInstallation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Reader:
    return Reader(server, monkeypatch, capsys).enter(tmp_path)


def train_one_step(server: ServedInstallation, model: str = MODEL, key: str = API_KEY) -> tuple[str, str]:
    """Return the paths of a training checkpoint and a sampler checkpoint."""
    with service_client(server, api_key=key) as service:
        client = service.create_lora_training_client(model, rank=RANK).result()
        client.forward_backward(DATA, "cross_entropy").result()
        client.optim_step(adam()).result()
        return client.save_state("last").result().path, client.save_weights_for_sampler("last").result().path


def placeholders_of(path: str) -> dict[str, str]:
    run, _, name = path.removeprefix("tinker://").split("/")
    return {"RUN": run, "NAME": name}


def listed_paths(server: ServedInstallation, key: str = API_KEY) -> set[str]:
    listed = tinker.RestClient(base_url=server.url, api_key=key).list_user_checkpoints().result()
    return {checkpoint.tinker_path for checkpoint in listed.checkpoints}


def test_the_commands_of_the_page_delete_the_checkpoints_of_a_run(reader: Reader) -> None:
    path, sampler = train_one_step(reader.server)
    reader.type_lines(fill_in(block("how-to/deleting.md", containing="--run-id RUN"), placeholders_of(path)))
    assert listed_paths(reader.server).isdisjoint({path, sampler})


def test_the_steps_of_the_page_delete_a_tenant_and_leave_others_alone(reader: Reader) -> None:
    server, page = reader.server, "how-to/deleting.md"
    others = set(train_one_step(server))
    key = reader.type_lines(f"tinsmith keys create loop --tenant research --data {server.data}").strip()
    reader.use_key(key)
    reader.type_lines(f"tinsmith promote greeter {train_one_step(server, key=key)[1]}")
    [listed] = json.loads(reader.type_lines(f"tinsmith keys list --tenant research --data {server.data} --json"))
    places = {"DIR": str(server.data), "NUMBER": str(listed["key_id"])}
    reader.type_lines(fill_in(block(page, containing="keys revoke"), places))
    exported = re.fullmatch(r"export TINKER_API_KEY=\$\((.+)\)\n", block(page, containing="keys create"))
    assert exported is not None
    new_key = reader.type_lines(fill_in(exported[1], {"DIR": str(server.data)})).strip()
    reader.use_key(new_key)
    assert reader.run_program(block(page, containing="import httpx")) == "2 checkpoints deleted\n"
    assert reader.run_program(block(page, containing="import httpx")) == "0 checkpoints deleted\n"
    assert listed_paths(server, new_key) == set()
    assert others <= listed_paths(server)
    [first, _] = json.loads(reader.type_lines(f"tinsmith keys list --tenant research --data {server.data} --json"))
    assert first["revoked_at"] is not None


def test_the_tutorial_about_the_console_trains_two_named_runs_and_calls_the_promoted_one(reader: Reader) -> None:
    server, page = reader.server, "tutorials/8_console.md"
    Path(MODEL).parent.mkdir()
    Path(MODEL).symlink_to(server.models[MODEL])
    trains, calls = block(page, containing="lesson.py"), block(page, containing="curl")
    program = fill_in(block(page, containing="run_log"), {"demo/tiny": MODEL, ", 300": ", 60"})
    samplers = []
    for command in trains.split("&"):
        rate = command.split()[-1]
        reader.monkeypatch.setattr(sys, "argv", ["lesson.py", rate])
        samplers.append(reader.run_program(program).split()[-1])
        run = server.get(f"/api/v1/training_runs/{samplers[-1].split('/')[2]}").json()
        assert run["display_name"] == f"Lesson at {float(rate):g}"
        assert (run["progress"]["step"], run["progress"]["total_steps"]) == (60, 60)
        reported = server.get(f"/api/v1/training_runs/{run['training_run_id']}/metrics").json()["reported"]
        assert [(one["step"], *one["values"]) for one in reported] == [
            (step, "eval/other_wording") for step in range(10, 70, 10)
        ]
    reader.type_lines(f"tinsmith promote teacher {samplers[-1]}")
    answered = subprocess.run(["bash", "-ec", calls], check=True, capture_output=True, text=True).stdout
    assert json.loads(answered)["choices"][0]["message"]["content"] == "Pots, pans and lanterns."


# peft calls transformers
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_the_commands_of_the_page_move_an_adapter_between_servers(reader: Reader) -> None:
    server, (path, sampler) = reader.server, train_one_step(reader.server)
    Path(MODEL).parent.mkdir()
    Path(MODEL).symlink_to(server.models[MODEL])
    moved = block("how-to/from-hosted-tinker.md", containing="tinsmith import")
    assert reader.type_lines(fill_in(moved, placeholders_of(path))).split()[-1] in listed_paths(server) - {path}
    peft, merged = block("reference/commands.md", containing="--layout merged").splitlines()
    reader.type_lines(fill_in(peft, {**placeholders_of(path), "OUT": "adapter"}))
    places = {**placeholders_of(sampler), "OUT": "model", "PATH": str(server.models[MODEL])}
    reader.type_lines(fill_in(merged, places))
    assert Path("model/config.json").is_file()
    [downloaded] = Path("downloads").glob("*/adapter_model.safetensors")
    before, after = load_file(downloaded), load_file("adapter/adapter_model.safetensors")
    assert {name: tensor.tobytes() for name, tensor in before.items()} == {
        name: tensor.tobytes() for name, tensor in after.items()
    }


def test_the_sizes_of_the_page_are_those_of_saved_checkpoints(reader: Reader) -> None:
    training, sampler = train_one_step(reader.server)
    config = reader.server.models[MODEL] / "config.json"
    reader.monkeypatch.setattr(sys, "argv", ["sizes.py", str(config), str(RANK)])
    said = reader.run_program(block("how-to/sizing.md", containing="import json"))
    sizes = {name: float(size) * 1e6 for name, size in re.findall(r"^(.+): ([\d.]+) MB$", said, re.MULTILINE)}
    listed = tinker.RestClient(base_url=reader.server.url, api_key=API_KEY).list_user_checkpoints().result()
    saved = {checkpoint.tinker_path: checkpoint.size_bytes for checkpoint in listed.checkpoints}
    headers_and_rounding = 12_000
    assert saved[training] == pytest.approx(sizes["training checkpoint"], abs=headers_and_rounding)
    assert saved[sampler] == pytest.approx(sizes["sampler checkpoint"], abs=headers_and_rounding)


@pytest.fixture
def restartable_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Reader]:
    """Return a reader whose server can be restarted; its engine starts quickly."""
    models = {REFERENCE_MODEL: make_tiny_model(tmp_path / "model")}
    server = ServedInstallation(tmp_path / "data", models, {"engine": REFERENCE_ENGINE})
    yield Reader(server.start(), monkeypatch, capsys).enter(tmp_path)
    server.stop()


def type_with_systemctl(reader: Reader, script: str) -> None:
    """Run a block of the page; its `systemctl` lines stop and start the reader's server."""
    first, *between, last = fill_in(script, {"/var/lib/tinsmith": str(reader.server.data.parent)}).splitlines()
    assert (first, last) == ("systemctl stop tinsmith", "systemctl start tinsmith")
    reader.server.stop()
    subprocess.run(["bash", "-ec", "\n".join(between)], check=True)
    reader.server.start()


def test_a_restored_backup_has_its_keys_and_checkpoints(restartable_reader: Reader) -> None:
    reader, server = restartable_reader, restartable_reader.server
    key = reader.type_lines(f"tinsmith keys create laptop --data {server.data}").strip()
    reader.use_key(key)
    backed_up = train_one_step(server, REFERENCE_MODEL, key)
    type_with_systemctl(reader, block("how-to/single-machine.md", containing="tar --create"))
    train_one_step(server, REFERENCE_MODEL, key)
    reader.type_lines(f"tinker checkpoint delete --yes {backed_up[0]}")
    type_with_systemctl(reader, block("how-to/single-machine.md", containing="tar --extract"))
    assert listed_paths(server, key) == set(backed_up)
    with service_client(server, api_key=key) as service:
        resumed = service.create_training_client_from_state_with_optimizer(backed_up[0]).result()
        resumed.forward_backward(DATA, "cross_entropy").result()
        resumed.optim_step(adam()).result()
