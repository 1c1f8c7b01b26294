"""A worker's log is read by programs: every line is one JSON object, for every library that wrote it."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import warnings
from collections.abc import Iterator

import pytest
import structlog
from tinsmith_trainer.process.output import LOGGERS, configure_logs


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = structlog.get_config()
    loggers = [logging.getLogger(name) for name in ("", *LOGGERS)]
    levels = [logger.level for logger in loggers]
    handlers = logging.getLogger().handlers
    yield
    structlog.configure(**before)
    logging.captureWarnings(False)
    logging.getLogger().handlers = handlers
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, str]]:
    return [json.loads(line) for line in capsys.readouterr().err.splitlines()]


def test_logs_of_tinsmith_and_libraries_and_pythons_warnings_have_one_form(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logs("json", "info")
    structlog.get_logger("tinsmith_trainer.ours").info("done", model_id="m")
    try:
        raise ValueError("of a library")
    except ValueError:
        logging.getLogger("library").exception("it failed with %s", "7")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("soon gone", FutureWarning, stacklevel=1)
    own_line, library, warning = lines(capsys)
    assert (own_line["event"], own_line["level"], own_line["model_id"]) == ("done", "info", "m")
    assert own_line["logger"] == "tinsmith_trainer.ours"
    assert (library["event"], library["level"], library["logger"]) == ("it failed with 7", "error", "library")
    assert "ValueError: of a library" in library["exception"]
    assert "FutureWarning: soon gone" in warning["event"]
    assert all(line["timestamp"] for line in (own_line, library, warning))


@pytest.mark.parametrize(("level", "line_count"), [("debug", 1), ("warning", 1), ("error", 0)])
def test_warnings_and_errors_of_libraries_are_logged(
    level: str, line_count: int, capsys: pytest.CaptureFixture[str]
) -> None:
    configure_logs("json", level)
    logging.getLogger("library").info("a step")
    logging.getLogger("library").warning("a doubt")
    assert len(lines(capsys)) == line_count


LOGGING = """
import structlog
from tinsmith_trainer.process.output import configure_logs

configure_logs({format!r}, "info")
log = structlog.get_logger("tinsmith_trainer.training.scheduler")
try:
    raise ValueError("of an operation")
except ValueError:
    log.exception("operation failed")
print("and continues")
"""


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_an_unwritable_log_line_ends_no_process(log_format: str) -> None:
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [sys.executable, "-c", LOGGING.format(format=log_format)],
            stdout=subprocess.PIPE,
            stderr=full,
            text=True,
            check=False,
        )
    assert ended.stdout == "and continues\n"


def test_a_console_shows_an_error_without_the_values_around_it(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logs("console", "info")
    secret = "tml-" + "1234"
    try:
        raise ValueError("of an operation")
    except ValueError:
        structlog.get_logger("tinsmith_trainer.training.scheduler").exception("operation failed")
    said = capsys.readouterr().err
    assert "ValueError: of an operation" in said
    assert secret not in said
