"""`tinsmith models`."""

from __future__ import annotations

import json

import pytest
from support.client.stub_server import GOOD_KEY, stub_server
from tinsmith.cli import main


@pytest.fixture(autouse=True)
def good_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_API_KEY", GOOD_KEY)


def test_models_lists_names_and_lengths(capsys: pytest.CaptureFixture[str]) -> None:
    with stub_server() as url, pytest.raises(SystemExit) as end:
        main(["models", "--base-url", url])
    assert end.value.code == 0
    shown = capsys.readouterr().out
    assert "org/tiny" in shown
    assert "4096 tokens" in shown


def test_an_address_that_cannot_be_one_is_corrected(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["models", "--base-url", "127.0.0.1:8000"])
    assert end.value.code == 1
    assert "put http:// in front: http://127.0.0.1:8000" in capsys.readouterr().err


def test_models_prints_json_for_scripts(capsys: pytest.CaptureFixture[str]) -> None:
    with stub_server() as url, pytest.raises(SystemExit):
        main(["models", "--base-url", url, "--json"])
    assert json.loads(capsys.readouterr().out) == [{"name": "org/tiny", "max_context_length": 4096}]
