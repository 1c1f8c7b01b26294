"""A fleet of fake workers in this process: real gRPC, real epochs, no child processes."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from support.fake_worker import FakeWorker, serve_fake_worker
from tinsmith_server.errors import ModelUnloadable, WorkerUnavailable
from tinsmith_server.fleet.base import EpochRegistry, Fleet, ServedModel, WorkerClient, WorkerHandle
from tinsmith_server.fleet.client import GrpcWorkerClient
from typing_extensions import override

BASE_MODEL = "org/tiny"
ALIAS = "org/tiny-instruct"
OTHER_MODEL = "org/other"

MODELS = (
    ServedModel(BASE_MODEL, "tiny-1", "TinyForCausalLM", 1024),
    ServedModel(ALIAS, "tiny-1", "TinyForCausalLM", 1024),
    ServedModel(OTHER_MODEL, "other-1", "TinyForCausalLM", 1024),
)


class FakeHandle(WorkerHandle):
    """`down` is the reason why nobody reaches the worker; `unloadable` says that it is the model's fault."""

    def __init__(self, worker_id: str) -> None:
        self._worker_id = worker_id
        self.fake = FakeWorker()
        self.down: str | None = None
        self.unloadable = False
        self.waits: list[float] = []
        self._client: GrpcWorkerClient | None = None
        self._epochs: EpochRegistry | None = None
        self._server: Any = None
        self._renewing = asyncio.Lock()

    async def open(self, epochs: EpochRegistry, directory: Path) -> None:
        self._epochs = epochs
        socket = directory / f"{self._worker_id}.sock"
        self._server = await serve_fake_worker(self.fake, socket)
        self._client = GrpcWorkerClient(f"unix:{socket}")

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()
            await self._server.stop(None)

    @property
    @override
    def worker_id(self) -> str:
        return self._worker_id

    @override
    async def connection(self, timeout_seconds: float) -> WorkerClient:
        self.waits.append(timeout_seconds)
        assert self._client is not None
        if self.down is not None:
            if self.unloadable:
                raise ModelUnloadable(self.down)
            await asyncio.sleep(timeout_seconds)
            raise WorkerUnavailable(self.down)
        if self.fake.epoch == 0:
            await self.renew()
        return self._client

    @override
    def running(self) -> WorkerClient | None:
        return self._client if self.down is None and self.fake.epoch else None

    @override
    async def renew(self) -> None:
        async with self._renewing:
            await self._renew()

    async def _renew(self) -> None:
        assert self._epochs is not None
        assert self._client is not None
        row = await self._epochs.get_worker(self._worker_id)
        if row.instance_id != self.fake.instance_id:
            raised = await self._epochs.raise_epoch(self._worker_id, row.epoch, self.fake.instance_id)
            assert raised is not None
            row = raised
        await self._client.activate(row.epoch)


class FakeFleet(Fleet):
    """Its workers survive `close`, as pods survive their API server."""

    def __init__(self, models: Sequence[ServedModel] = MODELS) -> None:
        self._models = {model.name: model for model in models}
        self.handles = {model.worker_id: FakeHandle(model.worker_id) for model in models}
        self._directory = tempfile.TemporaryDirectory(prefix="tinsmith-")

    @override
    async def open(self, epochs: EpochRegistry) -> None:
        for handle in self.handles.values():
            await handle.open(epochs, Path(self._directory.name))

    @override
    async def close(self) -> None:
        for handle in self.handles.values():
            await handle.close()

    @property
    @override
    def models(self) -> Sequence[ServedModel]:
        return list(self._models.values())

    @override
    def model(self, name: str) -> ServedModel | None:
        return self._models.get(name)

    @property
    @override
    def workers(self) -> Sequence[WorkerHandle]:
        return list(self.handles.values())

    @override
    def worker(self, worker_id: str) -> WorkerHandle:
        if worker_id not in self.handles:
            raise WorkerUnavailable(f"no served model belongs to {worker_id}")
        return self.handles[worker_id]

    def cleanup(self) -> None:
        self._directory.cleanup()
