"""What `tinsmith serve` says to a person and to a script."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest
from tinsmith_server.cli.serving import announce, say_stopped, tell_person
from tinsmith_server.services.accounts.keys import NewKey
from tinsmith_server.store.records import ApiKey

URL = "http://127.0.0.1:8000"


def on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within the test: pytest puts another stream in place of standard error after fixtures are set up."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)


def first_key() -> NewKey:
    record = ApiKey(key_id=1, tenant="default", name="", prefix="tml-a", created_at=datetime.now(UTC))
    return NewKey("tml-a-secret", record)


def test_a_person_gets_a_line_to_paste(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_terminal(monkeypatch)
    announce(URL, first_key(), public_url=None)
    output = capsys.readouterr()
    assert output.out == f"{URL}\n"
    assert output.err.splitlines()[-1] == f"export TINKER_BASE_URL={URL} TINKER_API_KEY=tml-a-secret"


def test_the_line_to_paste_has_the_address_that_clients_use(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    on_a_terminal(monkeypatch)
    announce(URL, first_key(), public_url="https://train.example")
    assert "TINKER_BASE_URL=https://train.example " in capsys.readouterr().err


def test_a_server_that_has_keys_says_its_address_only(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    on_a_terminal(monkeypatch)
    announce(URL, None, public_url=None)
    assert capsys.readouterr() == (f"{URL}\n", "")


def test_a_script_finds_the_url_alone_and_the_key_on_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    announce(URL, first_key(), public_url=None)
    assert capsys.readouterr() == (f"{URL}\n", "API key, shown only this once: tml-a-secret\n")


def test_a_person_hears_that_everything_is_kept(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    on_a_terminal(monkeypatch)
    say_stopped(Path("tinsmith-data"))
    assert capsys.readouterr().err == "stopped; everything is kept in tinsmith-data\n"


def test_a_script_hears_nothing_of_a_stop(capsys: pytest.CaptureFixture[str]) -> None:
    say_stopped(Path("tinsmith-data"))
    assert capsys.readouterr() == ("", "")


def test_a_person_hears_how_far_the_loading_of_models_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    on_a_terminal(monkeypatch)
    tell_person("loading base model demo/tiny")
    assert capsys.readouterr() == ("", "loading base model demo/tiny\n")


def test_a_script_reads_in_the_log_how_far_the_loading_is(capsys: pytest.CaptureFixture[str]) -> None:
    tell_person("loading base model demo/tiny")
    assert capsys.readouterr() == ("", "")
