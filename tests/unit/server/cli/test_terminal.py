"""The output of `tinsmith serve` for a person and for a script."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
from tinsmith_server.cli.serving import announce, listen, print_progress, quiet_on_a_terminal, url_at
from tinsmith_server.configuration import load_settings
from tinsmith_server.services.accounts.keys import NewKey
from tinsmith_server.store.records import ApiKey


def on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attach a terminal within the test: pytest replaces standard error after fixtures are set up."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)


def first_key() -> NewKey:
    record = ApiKey(key_id=1, tenant="default", name="", prefix="tml-a", created_at=datetime.now(UTC))
    return NewKey("tml-a-secret", record)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with listen("127.0.0.1", 0) as listener:
        yield listener


def lines_of(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return the lines on standard error between the two rules."""
    first, *lines, last = capsys.readouterr().err.splitlines()
    assert set(first) == set(last) == {"─"}
    return lines


def test_a_person_gets_the_url_the_key_and_the_next_command(
    listener: socket.socket, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    on_a_terminal(monkeypatch)
    announce(listener, first_key(), public_url=None)
    url = url_at(*listener.getsockname())
    assert lines_of(capsys) == [
        f"Tinsmith answers at {url}",
        f"Console: {url}/console",
        "API key, shown only this once: tml-a-secret",
        "",
        "In the terminal of your programs:",
        f"export TINKER_BASE_URL={url} TINKER_API_KEY=tml-a-secret",
        "tinsmith doctor",
    ]


def test_the_line_to_paste_has_the_address_that_clients_use(
    listener: socket.socket, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    on_a_terminal(monkeypatch)
    announce(listener, first_key(), public_url="https://train.example")
    assert "TINKER_BASE_URL=https://train.example " in capsys.readouterr().err


@pytest.mark.parametrize("terminals", [[], ["stderr"], ["stderr", "stdout"]], ids=["none", "errors", "both"])
def test_the_url_is_alone_on_standard_output_unless_a_person_reads_both(
    terminals: list[str],
    listener: socket.socket,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for stream in terminals:
        monkeypatch.setattr(getattr(sys, stream), "isatty", lambda: True)
    announce(listener, None, public_url=None)
    alone = f"{url_at(*listener.getsockname())}\n"
    assert capsys.readouterr().out == ("" if "stdout" in terminals else alone)


def test_a_server_on_all_addresses_names_a_reachable_one_and_warns_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    on_a_terminal(monkeypatch)
    host = "0.0.0.0"
    with listen(host, 0) as listener:
        announce(listener, None, public_url=None)
        port = listener.getsockname()[1]
    said = capsys.readouterr()
    assert said.err.count("unencrypted") == 1
    assert host not in said.err.partition("://")[2].partition("\n")[0]
    assert f":{port}" in said.err
    assert said.out == f"{url_at(host, port)}\n"


@pytest.mark.parametrize(
    ("host", "public_url", "warns"),
    [
        ("127.0.0.1", None, False),
        ("0.0.0.0", None, True),
        ("0.0.0.0", "https://train.example", False),
        ("0.0.0.0", "http://train.example", True),
    ],
)
def test_the_warning_is_for_plain_http_that_others_reach(
    host: str,
    public_url: str | None,
    warns: bool,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_a_terminal(monkeypatch)
    with listen(host, 0) as listener:
        announce(listener, None, public_url)
    assert ("unencrypted" in capsys.readouterr().err) is warns


def test_a_script_finds_the_url_alone_and_the_key_on_standard_error(
    listener: socket.socket, capsys: pytest.CaptureFixture[str]
) -> None:
    announce(listener, first_key(), public_url=None)
    url = url_at(*listener.getsockname())
    assert capsys.readouterr() == (f"{url}\n", "API key, shown only this once: tml-a-secret\n")


@pytest.mark.parametrize(
    ("on_one", "options", "level"),
    [(True, {}, "warning"), (False, {}, "info"), (True, {"log_level": "info"}, "info")],
    ids=["terminal", "script", "given"],
)
def test_a_terminal_shows_only_warnings_by_default(
    on_one: bool, options: dict[str, Any], level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TINSMITH_LOG_LEVEL", raising=False)
    if on_one:
        on_a_terminal(monkeypatch)
    settings = load_settings({"models": ("a=b",), **options})
    assert quiet_on_a_terminal(settings).log_level == level


def test_a_person_hears_how_far_the_loading_of_models_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    on_a_terminal(monkeypatch)
    print_progress("loading base model demo/tiny")
    assert capsys.readouterr() == ("", "loading base model demo/tiny\n")


def test_a_script_reads_in_the_log_how_far_the_loading_is(capsys: pytest.CaptureFixture[str]) -> None:
    print_progress("loading base model demo/tiny")
    assert capsys.readouterr() == ("", "")
