"""Traces of requests and operations, exported by OpenTelemetry.

Tracing is on if one of the environment variables of `ENDPOINTS` is set, and takes OpenTelemetry's other variables, too.
Without them, OpenTelemetry is not imported, and each function here does nothing. The packages are those of the extra
`tracing`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Tracer

ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
TRACEPARENT = "traceparent"
"""The name of the HTTP header and of the gRPC metadata with the caller's span, in the form of W3C Trace Context."""
NANOSECONDS = 10**9
Value = str | int | float | bool


class TracingUnavailable(Exception):
    """The environment asks for traces, and the packages are not installed."""


class _State:
    provider: TracerProvider | None = None
    tracer: Tracer | None = None


def is_requested() -> bool:
    """Return whether the environment asks for traces."""
    is_disabled = os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
    return not is_disabled and any(os.environ.get(name) for name in ENDPOINTS)


def start(service: str) -> None:
    """Begin to export traces if the environment asks for them. `OTEL_SERVICE_NAME` replaces the name of the service.

    Raises TracingUnavailable.
    """
    if _State.tracer is not None or not is_requested():
        return
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise TracingUnavailable(
            f"an OTLP endpoint is set ({', '.join(ENDPOINTS)}), and {error.name} is not installed: install "
            "tinsmith[tracing], or unset the variable"
        ) from error
    named = {SERVICE_NAME: os.environ.get("OTEL_SERVICE_NAME", service)}
    _State.provider = TracerProvider(resource=Resource.create(named))
    _State.provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    _State.tracer = _State.provider.get_tracer("tinsmith")


def stop() -> None:
    """Export what is left. Later spans are dropped."""
    provider, _State.provider, _State.tracer = _State.provider, None, None
    if provider is not None:
        provider.shutdown()


def is_on() -> bool:
    return _State.tracer is not None


def current() -> str:
    """Return the current span for a request to another process, or an empty text."""
    if _State.tracer is None:
        return ""
    from opentelemetry.trace import INVALID_SPAN, get_current_span
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    if get_current_span() is INVALID_SPAN:
        return ""
    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return carrier.get(TRACEPARENT, "")


@contextmanager
def span(name: str, parent: str = "", *, is_server: bool = False) -> Iterator[SpanNotes]:
    """Measure the block as a span, below `parent` or else below the current span.

    Only a server's span may begin a trace.
    """
    notes = SpanNotes()
    if _State.tracer is None or not (is_server or current()):
        yield notes
        return
    from opentelemetry.trace import SpanKind, Status, StatusCode

    kind = SpanKind.SERVER if is_server else SpanKind.CLIENT
    with _State.tracer.start_as_current_span(name, _context(parent) if parent else None, kind) as measured:
        try:
            yield notes
        finally:
            measured.update_name(notes.name or name)
            measured.set_attributes(notes.attributes)
            if notes.failure:
                measured.set_status(Status(StatusCode.ERROR, notes.failure))


class SpanNotes:
    """Notes on a span that is still measured: its final name, attributes, and the reason of a failure."""

    def __init__(self) -> None:
        self.name = ""
        self.attributes: dict[str, Value] = {}
        self.failure = ""


def record(
    name: str,
    parent: str,
    started: float,
    ended: float,
    attributes: Mapping[str, Value] | None = None,
    failure: str = "",
) -> str:
    """Record a span that is over, with times in Unix seconds. Return the span as the parent of other spans.

    Without a `parent`, nothing is recorded: only what a traced request has caused belongs to a trace. Thread-safe.
    """
    if _State.tracer is None or not parent:
        return ""
    from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    at = int(started * NANOSECONDS)
    over = _State.tracer.start_span(name, _context(parent), SpanKind.INTERNAL, dict(attributes or {}), start_time=at)
    if failure:
        over.set_status(Status(StatusCode.ERROR, failure))
    over.end(max(at, int(ended * NANOSECONDS)))
    carrier: dict[str, Any] = {}
    TraceContextTextMapPropagator().inject(carrier, set_span_in_context(over))
    return str(carrier.get(TRACEPARENT, ""))


def _context(parent: str) -> Context:
    """Return the context of a `traceparent`. An invalid one counts as none."""
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract({TRACEPARENT: parent})
