"""Structured logs on standard error, with one JSON object on each line."""

from __future__ import annotations

import logging
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import Context
from typing import Any

import structlog


def configure_logs(level: str) -> None:
    """Configure structlog and the standard library's loggers with the same renderer."""
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.JSONRenderer(),
            ],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper())
    # At level `debug`, the Kubernetes client would log users and the paths of tokens.
    for library in ("aiohttp", "asyncio", "kopf", "kubernetes"):
        logging.getLogger(library).setLevel(logging.WARNING)
    # Kopf warns that it handles no signals in a thread. The operator intends that.
    logging.getLogger("kopf._core.reactor.running").setLevel(logging.ERROR)


@contextmanager
def in_reconcile(namespace: str, kind: str, name: str, **more: object) -> Iterator[None]:
    """Add the object and the ID of the reconcile to each log line inside the context."""
    which = {"namespace": namespace, "kind": kind, "name": name, **more, "reconcile": secrets.token_hex(6)}
    with structlog.contextvars.bound_contextvars(**which):
        yield


def outside_of_reconciles() -> Context:
    """Return a log context for a task that continues after the reconcile that started the task."""
    return Context()


def get_logger(name: str) -> structlog.stdlib.BoundLogger:
    logger: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger(name)
    return logger
