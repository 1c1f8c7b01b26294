"""A step is one trace, from the call of an SDK program to the engine, in the exporter that the environment names."""

from __future__ import annotations

import gzip
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import tinker
from opentelemetry.instrumentation.httpx import HTTPXClientInstrumentor
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from opentelemetry.sdk.trace import TracerProvider
from support.client.sdk import service_client
from support.server.serve_process import ServedInstallation
from support.waiting import until
from tinker import types
from tinsmith_trainer.torch_model.tiny_model import make_tiny_model

MODEL = "tiny"
CALLS = ("forward_backward", "optim_step")
PROMPT = types.ModelInput.from_ints([1, 2, 3])


class Collector(http.server.ThreadingHTTPServer):
    """A collector of traces, as OTLP over HTTP reaches it."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.spans: list[tuple[str, Span]] = []

    def children(self, parent: bytes) -> dict[str, Span]:
        """Return the spans directly below a span, by name."""
        return {span.name: span for _, span in self.spans if span.parent_span_id == parent}


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        content = gzip.decompress(body) if self.headers.get("content-encoding") == "gzip" else body
        for part in ExportTraceServiceRequest.FromString(content).resource_spans:
            [service] = [one.value.string_value for one in part.resource.attributes if one.key == "service.name"]
            self.server.spans += [(service, span) for scope in part.scope_spans for span in scope.spans]
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as collector:
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        yield collector
        collector.shutdown()


@pytest.fixture
def traced_program() -> Iterator[TracerProvider]:
    """Return the provider of a program that instruments its HTTP calls."""
    provider = TracerProvider()
    instrumentor = HTTPXClientInstrumentor()
    instrumentor.instrument(tracer_provider=provider)
    yield provider
    instrumentor.uninstrument()


@pytest.fixture
def client(tmp_path: Path, collector: Collector, traced_program: TracerProvider) -> Iterator[tinker.ServiceClient]:
    endpoint = f"http://127.0.0.1:{collector.server_port}"
    variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "OTEL_BSP_SCHEDULE_DELAY": "100"}
    model = make_tiny_model(tmp_path / "model")
    installation = ServedInstallation(tmp_path / "data", {MODEL: model}, variables=variables)
    installation.start()
    with service_client(installation) as client:
        yield client
    installation.stop()


def test_a_step_and_a_sample_are_traced_from_the_program_to_the_engine(
    client: tinker.ServiceClient, collector: Collector, traced_program: TracerProvider
) -> None:
    training = client.create_lora_training_client(MODEL, rank=4).result()
    inputs = {"target_tokens": [2, 3, 4], "weights": [1.0] * 3}
    datum = types.Datum(model_input=PROMPT, loss_fn_inputs=inputs)
    with traced_program.get_tracer("program").start_as_current_span("a step") as step:
        gradient = training.forward_backward([datum], "cross_entropy")
        training.optim_step(types.AdamParams(learning_rate=1e-3)).result()
        gradient.result()
    trace_id = step.get_span_context().trace_id.to_bytes(16, "big")

    def of_step(name: str) -> list[Span]:
        return [span for _, span in list(collector.spans) if span.trace_id == trace_id and span.name == name]

    # Server and worker export on their own.
    names = ("commit to the journal", "worker Submit", *(f"POST /api/v1/{call}" for call in CALLS))
    until(lambda: [len(of_step(name)) for name in names] == [2, 2, 1, 1])
    for call in CALLS:
        [request] = of_step(f"POST /api/v1/{call}")
        submitted = collector.children(request.span_id)["worker Submit"]
        operation = collector.children(submitted.span_id)[call]
        parts = collector.children(operation.span_id)
        assert list(parts) == ["wait for the turn", "engine", "commit to the journal"]
        assert parts["engine"].end_time_unix_nano <= operation.end_time_unix_nano
        attributes = {one.key: one.value for one in operation.attributes}
        assert attributes["tinsmith.model_id"].string_value == training.model_id
    assert {service for service, _ in collector.spans} == {"tinsmith-server", "tinsmith-worker"}
    assert not [span.name for _, span in collector.spans if "retrieve_future" in span.name], "polls are no calls"
    client.create_sampling_client(base_model=MODEL).result().sample(
        PROMPT, num_samples=1, sampling_params=types.SamplingParams(max_tokens=2)
    ).result()
    until(lambda: any(span.name == "sampler" for _, span in list(collector.spans)))
