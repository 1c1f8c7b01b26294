"""The server's application in this process, spoken to by HTTP, over a fleet of fake workers."""

from __future__ import annotations

import itertools
import re
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from pydantic import SecretStr
from support.server.empty_stores import with_schema
from support.server.fake_fleet import BASE_MODEL, FakeFleet, FakeHandle
from support.server.fake_worker import FakeWorker
from tinsmith_rpc import wire_pb2
from tinsmith_server.app import create_app
from tinsmith_server.services.assembly import Services
from tinsmith_server.settings import Settings
from typing_extensions import override

API_KEY = "tml-test-key"
PROTOBUF = {"content-type": "application/x-protobuf"}


@dataclass
class Time:
    """A clock that only tests move."""

    now: datetime = field(default_factory=lambda: datetime.now(UTC))

    def __call__(self) -> datetime:
        return self.now

    def pass_seconds(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)


@dataclass(frozen=True)
class TestedServer:
    """One life of the application, and the calls that tests make most."""

    __test__ = False

    app: FastAPI
    client: httpx.AsyncClient
    fleet: FakeFleet
    time: Time

    @property
    def services(self) -> Services:
        services: Services = self.app.state.services
        return services

    @property
    def handle(self) -> FakeHandle:
        return self.fleet.handles["tiny-1"]

    @property
    def worker(self) -> FakeWorker:
        return self.handle.fake

    @property
    def checkpoints(self) -> Path:
        """The checkpoint root."""
        return self.services.settings.data / "checkpoints"

    @property
    def newest_directory(self) -> Path:
        """Return the folder of the newest checkpoint."""
        return self.checkpoints / self.worker.events[-1].checkpoint_saved.directory

    async def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        return await self.client.post(path, json=body if body is not None else {}, **options)

    async def session(self, **options: Any) -> str:
        response = await self.post("/create_session", {"tags": [], "user_metadata": {}, "sdk_version": "0"}, **options)
        return str(response.json()["session_id"])

    async def create_model(self, session_id: str, number: int = 0, **fields: Any) -> httpx.Response:
        body = {"session_id": session_id, "model_seq_id": number, "base_model": BASE_MODEL, **fields}
        return await self.post("/create_model", body)

    async def model(self) -> str:
        """Create a model at its worker."""
        made = (await self.create_model(await self.session())).json()
        while (answer := await self.result(made["request_id"])).status_code == 408:
            pass  # a server that holds polls for a moment only, or a busy machine
        assert answer.status_code == 200
        return str(made["model_id"])

    async def result(self, request_id: str, **options: Any) -> httpx.Response:
        return await self.post("/retrieve_future", {"request_id": request_id, "allow_metadata_only": False}, **options)

    async def outcome(self, submitted: httpx.Response) -> dict[str, Any]:
        """Return the JSON result of an acknowledged operation."""
        assert submitted.status_code == 200, submitted.text
        request_id = submitted.json()["request_id"]
        while (response := await self.result(request_id)).status_code == 408:
            pass  # a busy machine may need longer than a first poll is held
        assert response.status_code == 200, response.text
        content: dict[str, Any] = response.json()
        return content

    async def forward_backward(self, model_id: str, seq_id: int, **options: Any) -> httpx.Response:
        return await self.client.post("/forward_backward", content=training_body(model_id, seq_id), **options)

    async def save(self, model_id: str, seq_id: int, name: str, **fields: Any) -> httpx.Response:
        body = {"model_id": model_id, "seq_id": seq_id, "path": name, **fields}
        return await self.post("/save_weights", body)

    async def sampler(self, **options: Any) -> str:
        """Open a sampling session on the base model."""
        body = {"session_id": await self.session(**options), "sampling_session_seq_id": 0, "base_model": BASE_MODEL}
        return str((await self.post("/create_sampling_session", body, **options)).json()["sampling_session_id"])

    async def sample(self, sampling_session_id: str, seq_id: int = 0, **fields: Any) -> httpx.Response:
        body = {
            "sampling_session_id": sampling_session_id,
            "seq_id": seq_id,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
            **fields,
        }
        return await self.post("/asample", body)


def training_body(model_id: str, seq_id: int, loss_fn: str = "cross_entropy") -> bytes:
    datum = wire_pb2.Datum()
    datum.model_input.add().encoded_text.tokens = b"\x01\0\0\0\x02\0\0\0"
    request = wire_pb2.ForwardBackwardRequest(model_id=model_id, seq_id=seq_id, data=[datum], loss_fn=loss_fn)
    return request.SerializeToString()


def settings_for(data: Path, **changes: Any) -> Settings:
    return Settings(**{"data": data, "api_key": SecretStr(API_KEY), "poll_hold_seconds": 30, **changes})


class InTurn(httpx.AsyncBaseTransport):
    """Each request goes to the next of several applications."""

    def __init__(self, apps: Sequence[FastAPI]) -> None:
        self._transports = itertools.cycle([httpx.ASGITransport(app) for app in apps])

    @override
    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        return await next(self._transports).handle_async_request(request)


class SharedFleet:
    """A fleet that another server has opened and will close."""

    def __init__(self, fleet: Any) -> None:
        self._fleet = fleet

    async def open(self, epochs: object) -> None: ...
    async def close(self) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fleet, name)


@asynccontextmanager
async def running_servers(settings: Settings, fleet: Any) -> AsyncIterator[tuple[TestedServer, TestedServer]]:
    """Two replicas on one store and one fleet."""
    time = Time()
    async with (
        running_server(settings, fleet, time) as first,
        running_server(settings, SharedFleet(fleet), time) as second,
    ):
        yield first, second


@asynccontextmanager
async def alternating_servers(settings: Settings, fleet: Any) -> AsyncIterator[TestedServer]:
    """Two replicas that look like one server: none of them hears two requests in a row."""
    async with (
        running_servers(settings, fleet) as (first, second),
        client_of(InTurn([first.app, second.app])) as client,
    ):
        yield replace(first, client=client)


@dataclass(frozen=True)
class Answer:
    method: str
    path: str
    status: int

    def is_of(self, method: str, template: str) -> bool:
        """Tell whether this is a success of a route, by its path as the document of the API writes it."""
        escaped = re.sub(r"\\\{(path|base_model)\\\}", ".+", re.escape(template))
        pattern = re.sub(r"\\\{\w+\\\}", "[^/]+", escaped)
        return self.status < 400 and self.method == method and re.fullmatch(pattern, self.path) is not None


_recorders: list[list[Answer]] = []


@contextmanager
def recorded_answers() -> Iterator[list[Answer]]:
    """All answers to clients of this module, while the context lasts."""
    answers: list[Answer] = []
    _recorders.append(answers)
    try:
        yield answers
    finally:
        _recorders.remove(answers)


async def record_answer(response: httpx.Response) -> None:
    for answers in _recorders:
        answers.append(Answer(response.request.method, response.request.url.path, response.status_code))


def client_of(transport: httpx.AsyncBaseTransport, key: str = API_KEY) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        transport=transport,
        base_url="http://server/api/v1",
        headers={"X-API-Key": key},
        timeout=60,
        event_hooks={"response": [record_answer]},
    )


@asynccontextmanager
async def running_server(
    settings: Settings, fleet: Any, time: Time | None = None, key: str = API_KEY
) -> AsyncIterator[TestedServer]:
    time = time or Time()
    with_schema(settings.store_url)
    app = create_app(settings, fleet, time)
    if isinstance(fleet, FakeFleet):
        fleet.keep_checkpoints(settings.data / "checkpoints")
    async with app.router.lifespan_context(app), client_of(httpx.ASGITransport(app), key) as client:
        yield TestedServer(app, client, fleet, time)


REPLICAS = {"one server": running_server, "two in turn": alternating_servers}
"""The installations that promises are kept in."""

one_server = pytest.mark.parametrize("server", ["one server"], indirect=True)
"""Tests of what a server says of itself, of refusals by the request alone, and of counted steps."""
