"""Keys never reach a log line."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator

import pytest
import structlog
from tinsmith_server.logs import configure_logs, get_logger, redact


@pytest.fixture(autouse=True)
def _configured() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    configure_logs("info", "json")
    yield
    root.handlers, root.level = handlers, level
    structlog.reset_defaults()


@pytest.mark.parametrize("text", ["key tml-abc_DEF-123", "x-api-key: tml-abc.", "('tml-abc',)", "eyJhbGciOi.eyJ4.sig"])
def test_a_key_is_masked_wherever_it_stands(text: str) -> None:
    assert "abc" not in redact(text)
    assert "hbGci" not in redact(text)


def test_a_line_is_one_json_object_with_its_ids_and_without_keys(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logs("info", "json")
    get_logger("t").info("done", session_id="sess-1", headers={"x-api-key": "tml-secret"}, tokens=("tml-secret",))
    line = json.loads(capsys.readouterr().err)
    assert (line["event"], line["session_id"], line["level"]) == ("done", "sess-1", "info")
    assert "secret" not in json.dumps(line)


def test_a_traceback_is_masked_too(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logs("info", "json")
    try:
        raise ValueError("bad key tml-secret")
    except ValueError:
        get_logger("t").exception("failed")
        logging.getLogger("other").exception("failed: %s", "tml-secret")
    output = capsys.readouterr().err
    assert "ValueError" in output
    assert "secret" not in output


@pytest.mark.parametrize(("on_terminal", "colours"), [(True, True), (False, False)], ids=["terminal", "file"])
def test_colours_are_for_terminals(
    on_terminal: bool, colours: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: on_terminal)
    configure_logs("info", "console")
    get_logger("t").info("done")
    assert ("\x1b[" in capsys.readouterr().err) is colours


@pytest.mark.parametrize(("on_terminal", "is_json"), [(True, False), (False, True)], ids=["terminal", "file"])
def test_people_read_text_and_programs_read_json(
    on_terminal: bool, is_json: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: on_terminal)
    configure_logs("info", "auto")
    get_logger("t").info("done")
    assert capsys.readouterr().err.startswith("{") is is_json
