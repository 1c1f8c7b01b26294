"""Weights are exported over HTTP as the trainer exports them from files, or with an error message."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tinker
import torch
from safetensors.torch import load_file
from support.client.sdk import adam, next_token_datum, service_client
from support.server.serve_process import API_KEY, ServedInstallation
from tinsmith.cli import main
from tinsmith.training import export_lora_weights
from tinsmith.training.errors import NotOffered
from tinsmith.training.exports import export as export_module

from .conftest import MODEL

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "training.md"
NO_ARCHIVE = NotOffered("this server gives no archive")


@pytest.fixture(scope="module")
def saved(server: ServedInstallation) -> dict[str, str]:
    """Return paths of one model's weights, by their kind."""
    with service_client(server) as client:
        model = client.create_lora_training_client(MODEL, rank=4).result()
        for _ in range(2):
            model.forward_backward([next_token_datum([5, 9, 2, 14])], "cross_entropy")
            model.optim_step(adam())
        return {
            "training": model.save_state("ck").result().path,
            "sampler": model.save_weights_for_sampler("ck").result().path or "",
            "external": model.save_weights_external("ck").result().path,
        }


@pytest.fixture
def without_archives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove archives from the server, as Tinker's own server has none."""

    def refuse(*_: object) -> None:
        raise NO_ARCHIVE

    monkeypatch.setattr(export_module, "fetch_from_archive", refuse)


def files_of(server: ServedInstallation, path: str) -> Path:
    run = path.split("/")[2].replace(":", ".")
    [folder] = server.data.glob(f"checkpoints/weights/{run}/*")
    return folder


def run_export(*arguments: object) -> int:
    with pytest.raises(SystemExit) as end:
        main(["export", *map(str, arguments)])
    return int(end.value.code or 0)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def exports_kept(client: tinker.ServiceClient) -> list[str]:
    kept = tinker.RestClient(client.holder).list_user_checkpoints().result().checkpoints
    return sorted(one.tinker_path for one in kept if "/external_weights/" in one.tinker_path)


def test_an_adapter_is_the_same_from_each_kind_of_path(
    server: ServedInstallation, client: tinker.ServiceClient, saved: dict[str, str]
) -> None:
    stored = load_file(files_of(server, saved["training"]) / "adapter_model.safetensors")
    for path in saved.values():
        adapter = export_lora_weights(path, service=client)
        assert same(dict(adapter.tensors), stored)
        assert (adapter.adapter_config["r"], adapter.adapter_config["base_model_name_or_path"]) == (4, MODEL)


@pytest.mark.parametrize("layout", ["peft", "merged"])
def test_the_command_writes_the_same_files_over_http_as_on_the_server(
    server: ServedInstallation,
    saved: dict[str, str],
    layout: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("TINKER_API_KEY", API_KEY)
    options = ("--layout", layout, "--base-model", server.models[MODEL])
    assert run_export(saved["sampler"], "--to", tmp_path / "http", *options, "--base-url", server.url) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'http'}\n"
    assert run_export(files_of(server, saved["training"]), "--to", tmp_path / "files", *options) == 0
    name = "adapter_model.safetensors" if layout == "peft" else "model.safetensors"
    assert same(load_file(tmp_path / "http" / name), load_file(tmp_path / "files" / name))
    assert {path.name for path in (tmp_path / "http").iterdir()} == {
        path.name for path in (tmp_path / "files").iterdir()
    }


@pytest.mark.usefixtures("without_archives")
def test_from_a_server_without_archives_a_state_comes_through_an_export_that_is_deleted(
    client: tinker.ServiceClient, saved: dict[str, str]
) -> None:
    before, rest = exports_kept(client), tinker.RestClient(client.holder)
    through = export_lora_weights(saved["training"], service=client)
    session = rest.get_session(client.holder.get_session_id()).result()
    assert session.training_run_ids == [], (
        "what was loaded for it holds no place for as long as the caller's session lasts"
    )
    assert same(dict(through.tensors), dict(export_lora_weights(saved["external"], service=client).tensors))
    assert exports_kept(client) == before


def test_the_command_says_failures_in_a_sentence(
    server: ServedInstallation,
    saved: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("TINKER_API_KEY", API_KEY)
    options = ("--to", tmp_path / "out", "--layout", "merged", "--base-url", server.url)
    for path, sentence in (
        (
            "tinker://run:train:0/weights/never",
            "tinsmith export: the server shows no tinker://run:train:0/weights/never",
        ),
        (saved["training"], f"tinsmith export: the base model {MODEL} cannot be loaded"),
    ):
        assert run_export(path, *options) == 1
        assert capsys.readouterr().err.startswith(sentence)
    assert not (tmp_path / "out").exists()


def test_the_program_of_the_page_exports(server: ServedInstallation, tmp_path: Path) -> None:
    programs = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    [source] = [program for program in programs if "export_lora_weights(" in program]
    source = source.replace('base_model="tiny"', f'base_model="{server.models[MODEL]}"').replace('"tiny"', f'"{MODEL}"')
    environment = os.environ | {"TINKER_BASE_URL": server.url, "TINKER_API_KEY": API_KEY}
    command = [sys.executable, "-c", source]
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True, timeout=200)
    assert (tmp_path / "adapter" / "adapter_config.json").is_file()
    assert (tmp_path / "merged" / "model.safetensors").is_file()
