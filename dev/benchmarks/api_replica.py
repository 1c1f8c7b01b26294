"""One replica of the API server for a running worker and, optionally, a sampler."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import uvicorn
from pydantic import SecretStr
from tinsmith_server.app import create_app
from tinsmith_server.cli.connections import KEEP_ALIVE_SECONDS, Addresses, BoundedProtocol, StoppingServer
from tinsmith_server.cli.serving import BACKLOG, SWITCH_SECONDS, listen, url_at
from tinsmith_server.errors import WorkerAbsent
from tinsmith_server.fleet.activation import ActivatedHandle
from tinsmith_server.fleet.base import (
    Changes,
    Fleet,
    SamplerClient,
    SamplerHandle,
    SamplerKind,
    SavesAddress,
    ServedModel,
    WorkerHandle,
)
from tinsmith_server.fleet.client import GrpcWorkerClient
from tinsmith_server.logs import configure_logs
from tinsmith_server.settings import Settings
from tinsmith_server.store.records import Worker
from tinsmith_server.store.store import Store
from typing_extensions import override

API_KEY = "tml-benchmark"
MODEL = "bench/reference"
WORKER_ID = "bench-worker"
SLOTS = 8
NETWORK = "bench"


class OneWorker(ActivatedHandle):
    """A client of a worker at a Unix socket. The first call activates the worker."""

    def __init__(self, socket: str, epochs: Store) -> None:
        """Make the client in the event loop that will use the client, because a channel belongs to one event loop."""
        super().__init__(WORKER_ID)
        self._target = f"unix:{socket}"
        self._client = GrpcWorkerClient(self._target)
        self._epochs = epochs

    @property
    @override
    def base_model(self) -> str:
        return MODEL

    @property
    @override
    def slots(self) -> int:
        return SLOTS

    @property
    @override
    def unavailable_reason(self) -> str | None:
        return None

    @property
    @override
    def saves(self) -> SavesAddress:
        """Return the worker's saves. If the worker keeps no saves, the sampler reads the checkpoint root."""
        return SavesAddress(self._target, WORKER_ID, NETWORK)

    @override
    async def connection(self, timeout_seconds: float) -> GrpcWorkerClient:
        return self._client

    @override
    def running(self) -> GrpcWorkerClient | None:
        return self._client

    async def close(self) -> None:
        await self._client.close()


class OneReplica(SamplerHandle):
    """A pool with one replica, which samples from the worker's saves."""

    kind: SamplerKind = "pool"
    sampler_id = name = "bench-replica"
    base_model = MODEL
    accepting = True
    takes_saves_in = NETWORK

    def __init__(self, socket: str) -> None:
        self._client = GrpcWorkerClient(f"unix:{socket}")

    @override
    async def connection(self, timeout_seconds: float) -> SamplerClient:
        return self._client

    @override
    def running(self) -> SamplerClient | None:
        return self._client

    async def close(self) -> None:
        await self._client.close()


class OneWorkerFleet(Fleet):
    """A fleet that never changes. If the pool has a replica, this replica samples instead of the worker."""

    def __init__(self, socket: str, sampler_socket: str | None) -> None:
        self._socket = socket
        self._sampler_socket = sampler_socket
        self._opened: OneWorker | None = None
        self._replicas: list[OneReplica] = []
        self._served = ServedModel(MODEL, WORKER_ID)
        self._changes = Changes()

    @override
    async def open(self, epochs: Store) -> None:
        self._opened = OneWorker(self._socket, epochs)
        await self._opened.renew()
        self._replicas = [OneReplica(self._sampler_socket)] if self._sampler_socket is not None else []

    @property
    def _worker(self) -> OneWorker:
        assert self._opened is not None
        return self._opened

    @override
    async def close(self) -> None:
        await self._worker.close()
        for replica in self._replicas:
            await replica.close()

    @property
    @override
    def changes(self) -> Changes:
        return self._changes

    @property
    @override
    def models(self) -> Sequence[ServedModel]:
        return [self._served]

    @override
    def model(self, name: str) -> ServedModel | None:
        return self._served if name == MODEL else None

    @property
    @override
    def workers(self) -> Sequence[WorkerHandle]:
        return [self._worker]

    @override
    def worker(self, worker_id: str) -> WorkerHandle:
        if worker_id != WORKER_ID:
            raise WorkerAbsent(f"there is no worker {worker_id}")
        return self._worker

    @override
    def trainers(self, base_model: str, rank: int) -> Sequence[WorkerHandle]:
        return self.workers

    @override
    def samplers(self, base_model: str, rank: int = 0) -> Sequence[SamplerHandle]:
        return self.all_samplers

    @property
    @override
    def all_samplers(self) -> Sequence[SamplerHandle]:
        return self._replicas or self.workers

    @override
    async def provide(self, base_model: str, *, rank: int = 0, sampling: bool = False) -> str:
        return "there will be no more"

    @override
    async def permanently_lost_reason(self, worker: Worker) -> str | None:
        return None

    @property
    @override
    def problem(self) -> str | None:
        return None


def main() -> None:
    """Print the URL as soon as the server answers, and serve until the process ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("socket", help="the worker's")
    parser.add_argument("data", type=Path)
    parser.add_argument("--checkpoint-root", required=True)
    parser.add_argument("--database-url")
    parser.add_argument("--sampler", help="socket of a process that samples in the worker's place")
    options = parser.parse_args()
    settings = Settings(
        data=options.data,
        database_url=options.database_url,
        api_key=SecretStr(API_KEY),
        checkpoint_root=options.checkpoint_root,
    )
    configure_logs("warning", "json")
    listener = listen("127.0.0.1", 0)
    app = create_app(settings, OneWorkerFleet(options.socket, options.sampler))
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="on",
        ws="none",
        proxy_headers=False,
        server_header=False,
        http=partial(BoundedProtocol, addresses=Addresses(settings.connections_per_address, ())),  # type: ignore[arg-type]
        timeout_keep_alive=int(KEEP_ALIVE_SECONDS),
        backlog=BACKLOG,
    )
    sys.setswitchinterval(SWITCH_SECONDS)
    # uvicorn repeats the signal after a clean stop.
    signal.signal(signal.SIGTERM, lambda _number, _frame: None)
    url = url_at(*listener.getsockname()[:2])
    StoppingServer(config, announce=lambda: print(url, flush=True)).run(sockets=[listener])


if __name__ == "__main__":
    main()
