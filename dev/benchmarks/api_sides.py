"""The two sides of the comparison: the same work, sent to the worker directly and through API servers."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import aiohttp
import grpc
from api_replica import API_KEY, MODEL
from support.worker.messages import forward_backward, next_token_datum
from tinsmith_rpc import worker_pb2, worker_pb2_grpc

TESTS = Path(__file__).parents[2] / "tests"
ROWS = 8
TOKENS = 16
START_SECONDS = 300.0
HOLD_SECONDS = 25.0
# This worker computes in a fraction of a millisecond, and samples nothing.
NUMPY_WORKER = ("--model", "reference", "--engine", "support.engine.reference:build_reference")
HEADERS = {"X-API-Key": API_KEY}


def body_of(model_id: str, seq_id: int) -> bytes:
    """Return a `forward_backward` request like a request of the SDK."""
    rows = [next_token_datum([(row + token) % 32 for token in range(TOKENS + 1)]) for row in range(ROWS)]
    return forward_backward(rows, model_id=model_id, seq_id=seq_id)


class ApiSide(Protocol):
    """Operations for one model, numbered from 1 without a gap."""

    model_id: str

    async def submit(self, seq_id: int) -> None: ...
    async def result(self, seq_id: int) -> None: ...


class BareWorker:
    """The reference: the same RPCs to the same worker, without an API server."""

    def __init__(self, stub: worker_pb2_grpc.WorkerAsyncStub, epoch: int, model_id: str) -> None:
        self.model_id = model_id
        self._stub = stub
        self._epoch = epoch

    async def submit(self, seq_id: int) -> None:
        request = worker_pb2.SubmitRequest(
            epoch=self._epoch,
            model_id=self.model_id,
            seq_id=seq_id,
            kind=worker_pb2.FORWARD_BACKWARD,
            payload=body_of(self.model_id, seq_id),
        )
        await self._stub.Submit(request)

    async def result(self, seq_id: int) -> None:
        request = worker_pb2.AwaitRequest(model_id=self.model_id, seq_id=seq_id, timeout_seconds=HOLD_SECONDS)
        reply = await self._stub.Await(request)
        assert reply.HasField("result"), reply


class Replicas:
    """Clients of the API servers over HTTP. Each request is sent to the next replica."""

    def __init__(self, session: aiohttp.ClientSession, urls: Sequence[str], model_id: str) -> None:
        self.model_id = model_id
        self._session = session
        self._urls = itertools.cycle(urls)

    async def submit(self, seq_id: int) -> None:
        url = f"{next(self._urls)}/api/v1/forward_backward"
        headers = {**HEADERS, "Content-Type": "application/x-protobuf"}
        async with self._session.post(url, data=body_of(self.model_id, seq_id), headers=headers) as answer:
            assert answer.status == 200, await answer.text()
            await answer.read()

    async def result(self, seq_id: int) -> None:
        await poll(self._session, next(self._urls), f"{self.model_id}:op:{seq_id}")


async def poll(session: aiohttp.ClientSession, url: str, request_id: str) -> None:
    """Poll until the result arrives."""
    body = {"request_id": request_id, "allow_metadata_only": False}
    while True:
        async with session.post(f"{url}/api/v1/retrieve_future", json=body, headers=HEADERS) as answer:
            content = await answer.read()
            if answer.status != 408:
                assert answer.status == 200, content
                return


async def new_model(session: aiohttp.ClientSession, url: str) -> str:
    started = {"tags": [], "user_metadata": {}, "sdk_version": "benchmark"}
    session_id = (await post(session, f"{url}/api/v1/create_session", started))["session_id"]
    create = {"session_id": session_id, "model_seq_id": 0, "base_model": MODEL, "lora_config": {"rank": 4}}
    made = await post(session, f"{url}/api/v1/create_model", create)
    await poll(session, url, made["request_id"])
    return str(made["model_id"])


async def post(session: aiohttp.ClientSession, url: str, body: object) -> Any:
    async with session.post(url, json=body, headers=HEADERS) as answer:
        assert answer.status == 200, await answer.text()
        return await answer.json()


@dataclass(frozen=True, slots=True)
class Installation:
    """The running processes: the worker's socket, the replicas' addresses, and the PIDs of all processes."""

    socket: Path
    worker_pid: int
    urls: Sequence[str]
    pids: Sequence[int]
    sampler_pid: int | None = None


@contextmanager
def installation(
    scratch: Path,
    replicas: int,
    database_url: str | None,
    engine: Sequence[str] = NUMPY_WORKER,
    *,
    sampler: Sequence[str] | None = None,
    checkpoint_root: str | None = None,
) -> Iterator[Installation]:
    """Start a worker with this engine, and API servers for this worker, each in a separate process.

    `sampler`: the options of a sampler process, which samples instead of the worker; None: no sampler process.
    """
    scratch.mkdir()
    root = ["--checkpoint-root", checkpoint_root or f"file://{scratch}/root"]
    socket, sampler_socket = scratch / "worker.sock", scratch / "sampler.sock"
    of_worker = [*engine, "--volume", str(scratch / "volume"), *(["--no-sampling"] if sampler is not None else [])]
    replica = [str(Path(__file__).with_name("api_replica.py")), str(socket), str(scratch), *root]
    with ExitStack() as running:
        worker = running.enter_context(_process(*_trainer(socket), *root, *of_worker))
        _wait_for(socket)
        sampler_pid = None
        if sampler is not None:
            own_sampler = running.enter_context(
                _process(*_trainer(sampler_socket), *root, "--role", "sampler", *sampler)
            )
            _wait_for(sampler_socket)
            sampler_pid = own_sampler.pid
            replica += ["--sampler", str(sampler_socket)]
        if database_url is not None:
            replica += ["--database-url", database_url]
        servers = [running.enter_context(_process(*replica)) for _ in range(replicas)]
        urls = [_printed(server) for server in servers]
        yield Installation(socket, worker.pid, urls, [server.pid for server in servers], sampler_pid)


def _trainer(socket: Path) -> list[str]:
    return ["-m", "tinsmith_trainer", "--model-name", MODEL, "--socket", str(socket), "--log-level", "error"]


@contextmanager
def _process(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen([sys.executable, *arguments], env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.terminate()


def _wait_for(socket: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not socket.exists():
        if time.monotonic() > deadline:
            raise RuntimeError("the worker did not start")
        time.sleep(0.05)


def _printed(server: subprocess.Popen[str]) -> str:
    assert server.stdout is not None
    line = server.stdout.readline().strip()
    if not line:
        raise RuntimeError(f"an API server ended with status {server.wait()}")
    return line


async def bare_worker(channel: grpc.aio.Channel, model_id: str) -> BareWorker:
    stub: worker_pb2_grpc.WorkerAsyncStub = worker_pb2_grpc.WorkerStub(channel)  # type: ignore[assignment]
    described = await stub.Describe(worker_pb2.DescribeRequest())
    return BareWorker(stub, described.epoch, model_id)
