"""Tracing is off without an endpoint, and costs no import; a missing package is named."""

from __future__ import annotations

import subprocess
import sys

import pytest
from tinsmith_rpc import tracing


@pytest.fixture(autouse=True)
def _no_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*tracing.ENDPOINTS, "OTEL_SDK_DISABLED"):
        monkeypatch.delenv(name, raising=False)


def test_without_an_endpoint_nothing_is_imported_and_nothing_is_recorded() -> None:
    program = (
        "import sys; from tinsmith_rpc import tracing; tracing.start('x')\n"
        "with tracing.span('a', is_server=True): assert tracing.current() == ''\n"
        "assert tracing.record('a', '00-1', 1.0, 2.0) == ''\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
    assert not tracing.is_on()


def test_an_endpoint_counts_unless_opentelemetry_is_disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://collector:4318/v1/traces")
    assert tracing.is_requested()
    monkeypatch.setenv("OTEL_SDK_DISABLED", "True")
    assert not tracing.is_requested()


def test_missing_packages_are_named_with_the_variable_and_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:4318")
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(tracing.TracingUnavailable, match=r"OTEL_EXPORTER_OTLP_ENDPOINT.*install tinsmith\[tracing\]"):
        tracing.start("tinsmith-server")
    assert not tracing.is_on()
