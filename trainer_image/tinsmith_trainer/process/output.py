"""Logs of a worker: one JSON object a line on standard error, or coloured text for a terminal.

All lines go through a handler of the standard library, which swallows what it cannot write. Threads that run operations
and write the journal log from where an exception is at its worst: a full disk below standard error, or a reader that
closed its pipe, must not end a model.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

import structlog
from rich.console import Console

# `__main__` is the conversion program.
OURS = ("tinsmith_trainer", "__main__")


def configure_logs(log_format: str, level: str) -> None:
    """`log_format` is "json" or "console"; `level` a name of the logging module.

    What libraries log, and Python's warnings, are rendered alike, from `warning` on.
    """
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        # Text, before a renderer sees it: the console's own shows local variables, which other threads change.
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
    for name in OURS:
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
    """Return a console that prints text as it is, and lets the terminal break long lines.

    Rich would print `:train:` in the id of a run as an emoji, and take brackets in a path for a style.
    """
    return Console(stderr=stderr, markup=False, emoji=False, highlight=False, soft_wrap=True)
