"""Structured logs on standard error. Log lines contain IDs of requests, sessions and models, and never a key."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import MutableMapping
from typing import Any, Literal

import structlog

LogFormat = Literal["auto", "json", "console"]

_KEY = re.compile(r"\b(tml-|eyJ)[A-Za-z0-9._~+/=-]+")


def redact(text: str) -> str:
    """Mask all text that looks like an API key or a JWT."""
    return _KEY.sub(r"\1***", text)


def _redact_event(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    for name, value in event.items():
        if isinstance(value, str):
            event[name] = redact(value)
        elif isinstance(value, dict | list | tuple | bytes):
            event[name] = redact(repr(value))
    return event


def bind_ids(**ids: str) -> None:
    """Add these IDs to every later log line of the current request."""
    structlog.contextvars.bind_contextvars(**ids)


def chosen_format(log_format: LogFormat) -> Literal["json", "console"]:
    """Return the log format. `auto` means console on a terminal, and JSON elsewhere."""
    if log_format == "auto":
        return "console" if sys.stderr.isatty() else "json"
    return log_format


def configure_logs(level: str, log_format: LogFormat) -> None:
    """Send structlog and the standard library's loggers through the same renderer."""
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
        _redact_event,
    ]
    structlog.configure(
        # The level filter comes first, because each request logs a line at level debug.
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )
    renderer: Any = (
        structlog.processors.JSONRenderer()
        if chosen_format(log_format) == "json"
        else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper())
    # uvicorn's messages repeat those of this server, and it would log a failed start as a traceback.
    logging.getLogger("uvicorn").setLevel(logging.CRITICAL)
    logging.getLogger("alembic").setLevel(logging.WARNING)


def get_logger(name: str) -> structlog.stdlib.BoundLogger:
    logger: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger(name)
    return logger
