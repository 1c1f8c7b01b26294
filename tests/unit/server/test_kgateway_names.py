"""An environment that was made for the kgateway Training API, and what is said of it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from tinsmith_server.configuration import SETTING_OF_NAME, WITHOUT_EFFECT, load_settings, notes_on
from tinsmith_server.errors import StartupError

MODELS = json.dumps([{"model_name": "org/a", "max_context_length": 512}, {"model_name": "/models/b"}])


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*SETTING_OF_NAME, *WITHOUT_EFFECT, *(name for name in os.environ if name.startswith("TINSMITH_"))):
        monkeypatch.delenv(name, raising=False)


def test_its_names_set_the_same_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    values = ("0.0.0.0", "9001", MODELS, "tml-secret", "/data/metadata", "WARN")
    for name, value in zip(SETTING_OF_NAME, values, strict=True):
        monkeypatch.setenv(name, value)
    settings = load_settings({})
    assert (settings.host, settings.port, settings.models) == ("0.0.0.0", 9001, ("org/a", "/models/b"))
    assert settings.api_key is not None
    assert settings.api_key.get_secret_value() == "tml-secret"
    assert (settings.data, settings.log_level) == (Path("/data/metadata"), "warning")


def test_tinsmiths_names_take_precedence_and_the_note_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRAINING_HOST", "0.0.0.0")
    monkeypatch.setenv("TRAINING_PORT", "9001")
    monkeypatch.setenv("RAY_ADDRESS", "ray://head:10001")
    monkeypatch.setenv("TINSMITH_PORT", "9002")
    (config := tmp_path / "server.yaml").write_text("host: 127.0.0.2\n")
    settings = load_settings({}, config)
    assert (settings.host, settings.port) == ("127.0.0.2", 9002)
    [note] = notes_on(settings, {}, config)
    assert f"TRAINING_HOST as host (but host in {config} has precedence)" in note
    assert "TRAINING_PORT as port (but TINSMITH_PORT has precedence)" in note
    assert "RAY_ADDRESS has no effect: workers are processes" in note


@pytest.mark.parametrize("models", ["org/a", "{}x", '["org/a"]', "[{}]", "7"])
def test_models_in_no_form_are_refused_in_a_sentence(monkeypatch: pytest.MonkeyPatch, models: str) -> None:
    monkeypatch.setenv("SUPPORTED_MODELS", models)
    with pytest.raises(StartupError, match="SUPPORTED_MODELS must be a JSON list"):
        load_settings({})


def test_a_value_that_does_not_fit_is_named_by_its_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINING_PORT", "many")
    with pytest.raises(StartupError, match="TRAINING_PORT: 'many' is invalid"):
        load_settings({})
