"""The directory that `--model` means, and the worker that serves it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tinsmith_server.errors import StartupError
from tinsmith_server.fleet.local.model_sources import locate_models


def model_directory(path: Path, **config: object) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_a_directory_is_served_under_any_name(tmp_path: Path) -> None:
    path = model_directory(tmp_path / "m", architectures=["LlamaForCausalLM"], max_position_embeddings=64)
    (found,) = locate_models([f"org/name={path}"])
    assert (found.served.name, found.served.architecture, found.served.max_context_length, found.path) == (
        "org/name",
        "LlamaForCausalLM",
        64,
        path,
    )


def test_names_that_share_a_directory_share_a_worker(tmp_path: Path) -> None:
    path = model_directory(tmp_path / "m")
    (tmp_path / "link").symlink_to(path)
    other = model_directory(tmp_path / "other" / "m")
    found = locate_models([f"a={path}", f"b={tmp_path / 'link'}", f"c={other}", str(path)])
    ids = [one.served.weights for one in found]
    assert ids[0] == ids[1] == ids[3] != ids[2]


def test_the_length_of_a_nested_text_model_is_found(tmp_path: Path) -> None:
    path = model_directory(tmp_path / "m", model_type="vl", text_config={"max_position_embeddings": 99})
    (found,) = locate_models([f"a={path}"])
    assert (found.served.max_context_length, found.served.architecture) == (99, "vl")


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("a={tmp}/none", "the directory .*/none does not exist"),
        ("a={tmp}/empty", "cannot read .*config.json"),
        ("a={tmp}/broken", "config.json is not JSON"),
        ("a={tmp}/list", "config.json is not a model configuration"),
        ("={tmp}/empty", "must not be empty"),
        ("a:b={tmp}/empty", "must not be empty or contain ':'"),
    ],
)
def test_a_model_that_is_not_there_is_refused_with_the_file_to_blame(tmp_path: Path, spec: str, sentence: str) -> None:
    (tmp_path / "empty").mkdir()
    model_directory(tmp_path / "broken").joinpath("config.json").write_text("{")
    model_directory(tmp_path / "list").joinpath("config.json").write_text("[]")
    with pytest.raises(StartupError, match=sentence):
        locate_models([spec.format(tmp=tmp_path)])


def test_a_name_stands_for_one_directory(tmp_path: Path) -> None:
    path = model_directory(tmp_path / "m")
    with pytest.raises(StartupError, match="'a' is given twice"):
        locate_models([f"a={path}", f"a={path}"])
