"""Where settings come from, which source wins, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from tinsmith_server.errors import StartupError
from tinsmith_server.settings import Settings, describe_settings, load_settings


@pytest.fixture(autouse=True)
def _no_settings_around_us(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in Settings.model_fields:
        monkeypatch.delenv(f"TINSMITH_{name.upper()}", raising=False)


def write(path: Path, content: object) -> Path:
    path.write_text(yaml.safe_dump(content) if path.suffix == ".yaml" else json.dumps(content))
    return path


def test_flags_win_over_environment_over_file_over_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "c.yaml", {"host": "file", "port": 1, "max_rank": 5})
    monkeypatch.setenv("TINSMITH_HOST", "environment")
    monkeypatch.setenv("TINSMITH_PORT", "2")
    settings = load_settings({"host": "flag", "port": None}, file)
    assert (settings.host, settings.port, settings.max_rank, settings.adapter_slots) == ("flag", 2, 5, 8)


@pytest.mark.parametrize("suffix", [".yaml", ".json"])
def test_a_file_may_be_yaml_or_json(tmp_path: Path, suffix: str) -> None:
    file = write(tmp_path / f"c{suffix}", {"models": ["a=b", "c"], "poll_hold_seconds": 20})
    assert load_settings({}, file).models == ("a=b", "c")


def test_models_in_the_environment_are_split_at_commas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINSMITH_MODELS", "org/a=/x, org/b")
    assert load_settings({}).models == ("org/a=/x", "org/b")


def test_an_unknown_key_in_a_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"unknown setting prot in .*there are: .*port"):
        load_settings({}, write(tmp_path / "c.yaml", {"prot": 1}))


@pytest.mark.parametrize(
    ("content", "sentence"),
    [("[1, 2]", "must hold a mapping"), ("a: [", "neither YAML nor JSON"), (None, "cannot read")],
)
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path, content: str | None, sentence: str) -> None:
    file = tmp_path / "c.yaml"
    if content is not None:
        file.write_text(content)
    with pytest.raises(StartupError, match=sentence):
        load_settings({}, file)


@pytest.mark.parametrize(
    ("name", "value"),
    [("port", 70000), ("poll_hold_seconds", 0), ("poll_hold_seconds", 60), ("api_key", "x"), ("max_rank", "many")],
)
def test_a_value_that_does_not_fit_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(StartupError, match=name):
        load_settings({name: value})


def test_what_is_in_force_can_be_read_back_without_secrets(tmp_path: Path) -> None:
    given = {"api_key": "tml-secret", "database_url": "postgresql://me:secret@host/db", "data": tmp_path}
    shown = describe_settings(load_settings(given))
    assert "secret" not in shown
    assert yaml.safe_load(shown)["database_url"] == "postgresql://me:***@host/db"


def test_what_is_shown_is_a_configuration_file(tmp_path: Path) -> None:
    settings = load_settings({"data": tmp_path, "models": ("a=b",), "lora_alpha": 16.0})
    file = tmp_path / "c.yaml"
    file.write_text(describe_settings(settings))
    again = load_settings({}, file)
    assert again.model_dump(exclude={"database_url", "checkpoint_root"}) == settings.model_dump(
        exclude={"database_url", "checkpoint_root"}
    )
    assert (again.store_url, again.checkpoints_url) == (settings.store_url, settings.checkpoints_url)


def test_trap_20_no_hold_can_be_set_that_outlives_the_sdks_poll() -> None:
    """The SDK's own timeout is 45 s; doubled by its transport, but not by every one."""
    with pytest.raises(StartupError, match="poll_hold_seconds"):
        load_settings({"poll_hold_seconds": 45})
    assert load_settings({}).poll_hold_seconds < 30
