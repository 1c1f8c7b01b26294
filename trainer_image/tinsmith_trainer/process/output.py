"""The output of the processes: logs and consoles.

A log has one JSON object per line on standard error, or coloured text on a terminal. All lines pass through a handler
of the standard library, which drops lines that cannot be written. The threads that run operations and write the journal
also write to the log, so a full disk or a closed pipe must not raise an error in these threads.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

import structlog
from rich.console import Console

# `__main__` is the conversion program.
LOGGERS = ("tinsmith_trainer", "__main__")


def configure_logs(log_format: str, level: str) -> None:
    """Configure the logs. `log_format` is "json" or "console"; `level` is a name of the logging module.

    Logs of libraries and Python's warnings have the same format. Logs of libraries are shown from level `warning`.
    """
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        # Format exceptions early, because the console's renderer would show local variables, which other threads
        # change.
        structlog.processors.format_exc_info,
    ]
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    least = logging.getLevelNamesMapping()[level.upper()]
    logging.getLogger().handlers = [_handler(log_format, shared)]
    logging.getLogger().setLevel(max(least, logging.WARNING))
    for name in LOGGERS:
        logging.getLogger(name).setLevel(least)
    logging.captureWarnings(True)


def _handler(log_format: str, shared: list[Any]) -> logging.Handler:
    renderer: structlog.typing.Processor = (
        structlog.processors.JSONRenderer()
        if log_format == "json"
        else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    )
    handler = logging.StreamHandler(sys.stderr)
    remove_meta = structlog.stdlib.ProcessorFormatter.remove_processors_meta
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(foreign_pre_chain=shared, processors=[remove_meta, renderer])
    )
    return handler


def make_console(*, stderr: bool = False) -> Console:
    """Return a console that prints text unchanged, and lets the terminal break long lines.

    Rich would print `:train:` in the ID of a run as an emoji, and parse brackets in a path as a style.
    """
    return Console(stderr=stderr, markup=False, emoji=False, highlight=False, soft_wrap=True)
