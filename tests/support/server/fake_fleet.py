"""A fleet of fake workers in this process: real gRPC, real epochs, no child processes."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from support.server.fake_worker import FakeWorker, serve_fake_worker
from tinsmith_server.errors import WorkerAbsent, WorkerUnavailable, WorkerUnstartable
from tinsmith_server.fleet.activation import ActivatedHandle
from tinsmith_server.fleet.base import (
    Changes,
    Fleet,
    SamplerHandle,
    SamplerKind,
    SavesAddress,
    ServedModel,
    WorkerHandle,
)
from tinsmith_server.fleet.client import GrpcWorkerClient
from tinsmith_server.store.records import Worker
from tinsmith_server.store.store import Store
from typing_extensions import override

BASE_MODEL = "org/tiny"
ALIAS = "org/tiny-instruct"
OTHER_MODEL = "org/other"

MODELS = (
    ServedModel(BASE_MODEL, "tiny-1", "TinyForCausalLM", 1024),
    ServedModel(ALIAS, "tiny-1", "TinyForCausalLM", 1024),
    ServedModel(OTHER_MODEL, "other-1", "TinyForCausalLM", 1024),
)


class FakeHandle(ActivatedHandle):
    """A handle of a worker. `down` is the reason why no server reaches it; `unloadable` makes it the model's fault.

    A `suspended` one is known to run nowhere, as when a human has stopped it.
    """

    def __init__(self, worker_id: str, weights: str, slots: int = 64) -> None:
        super().__init__(worker_id)
        self._slots = slots
        self.weights = weights
        self.suspended = False
        self.goes = False
        self.fake = FakeWorker()
        self.down: str | None = None
        self.unloadable = False
        self.waits: list[float] = []
        self.saves_address: SavesAddress | None = None
        self._client: GrpcWorkerClient | None = None
        self._server: Any = None

    async def open(self, epochs: Store, directory: Path) -> None:
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
    def base_model(self) -> str:
        return next(model.name for model in MODELS if model.weights == self.weights)

    @property
    @override
    def accepting(self) -> bool:
        return not self.suspended

    @property
    @override
    def slots(self) -> int:
        return self._slots

    @property
    @override
    def leaving(self) -> str | None:
        return f"worker {self.worker_id} was deleted" if self.goes else None

    @property
    @override
    def saves(self) -> SavesAddress | None:
        return self.saves_address

    @override
    async def connection(self, timeout_seconds: float) -> GrpcWorkerClient:
        self.waits.append(timeout_seconds)
        assert self._client is not None
        if self.down is not None:
            if self.unloadable:
                raise WorkerUnstartable(self.down)
            await asyncio.sleep(timeout_seconds)
            raise WorkerUnavailable(self.down)
        if self.fake.epoch == 0:
            await self._activate(self._client)
        return self._client

    @override
    def running(self) -> GrpcWorkerClient | None:
        return self._client if self.down is None and self.fake.epoch else None

    @property
    @override
    def unavailable_reason(self) -> str | None:
        return self.down


class FakeReplica(FakeHandle):
    """A replica of a pool: a sampler that is no worker.

    A `terminating` one takes no new samples, and keeps its results.
    """

    def __init__(self, sampler_id: str, weights: str) -> None:
        super().__init__(sampler_id, weights)
        self.terminating = False
        self.network: str | None = None

    @property
    @override
    def kind(self) -> SamplerKind:
        return "pool"

    @property
    @override
    def accepting(self) -> bool:
        return not self.terminating and self.down is None

    @property
    @override
    def takes_saves_in(self) -> str | None:
        return self.network

    @override
    def running(self) -> GrpcWorkerClient | None:
        return self._client if self.down is None else None

    @override
    async def connection(self, timeout_seconds: float) -> GrpcWorkerClient:
        self.fake.epoch = 1  # a sampler needs no activation
        return await super().connection(timeout_seconds)


class FakeFleet(Fleet):
    """A fleet whose workers survive `close`, as pods survive their API server.

    `capacity` is its answer about more workers; `asked` are the requests. The `unseen` ones appear with a refresh,
    unless it is `blind`: the reason why it cannot refresh.
    """

    def __init__(self, models: Sequence[ServedModel] = MODELS, handles: Sequence[FakeHandle] = ()) -> None:
        self.served = {model.name: model for model in models}
        made = handles or [FakeHandle(weights, weights) for weights in dict.fromkeys(one.weights for one in models)]
        self.handles = {handle.worker_id: handle for handle in made}
        self.replicas: dict[str, FakeReplica] = {}
        self.unseen: dict[str, FakeReplica] = {}
        self.capacity = "no more workers may be made"
        self.slot_requests: list[tuple[str, int, bool]] = []
        self.lost: dict[str, str] = {}
        self.not_ready: str | None = None
        self.blind: str | None = None
        self.refreshes = 0
        self._changes = Changes()
        self._epochs: Store | None = None
        self._checkpoints: Path | None = None
        self._directory = tempfile.TemporaryDirectory(prefix="tinsmith-")

    @override
    async def open(self, epochs: Store) -> None:
        self._epochs = epochs
        for handle in self.handles.values():
            await handle.open(epochs, Path(self._directory.name))

    @override
    async def close(self) -> None:
        for handle in (*self.handles.values(), *self.replicas.values()):
            await handle.close()

    async def add_replica(self, replica: FakeReplica) -> None:
        """Add a replica, as when a pool is scaled up."""
        assert self._epochs is not None
        await replica.open(self._epochs, Path(self._directory.name))
        replica.fake.epoch = 1
        self.replicas[replica.sampler_id] = replica
        self._changes.note()

    async def remove_replica(self, sampler_id: str) -> None:
        await self.replicas.pop(sampler_id).close()
        self._changes.note()

    def keep_checkpoints(self, root: Path) -> None:
        """Let its workers save files below `root`."""
        self._checkpoints = root
        for handle in self.handles.values():
            handle.fake.checkpoints = root

    async def add(self, handle: FakeHandle) -> None:
        assert self._epochs is not None
        handle.fake.checkpoints = self._checkpoints
        await handle.open(self._epochs, Path(self._directory.name))
        self.handles[handle.worker_id] = handle
        self._changes.note()

    async def remove(self, worker_id: str) -> None:
        await self.handles.pop(worker_id).close()
        self._changes.note()

    @property
    @override
    def changes(self) -> Changes:
        return self._changes

    @property
    @override
    def models(self) -> Sequence[ServedModel]:
        return list(self.served.values())

    @override
    def model(self, name: str) -> ServedModel | None:
        return self.served.get(name)

    @property
    @override
    def workers(self) -> Sequence[WorkerHandle]:
        return list(self.handles.values())

    @override
    def worker(self, worker_id: str) -> WorkerHandle:
        if worker_id not in self.handles:
            raise WorkerAbsent(f"there is no worker {worker_id}")
        return self.handles[worker_id]

    @override
    def trainers(self, base_model: str, rank: int) -> Sequence[WorkerHandle]:
        return [one for one in self._holders(base_model) if not one.leaving and not one.suspended]

    @override
    def samplers(self, base_model: str, rank: int = 0) -> Sequence[SamplerHandle]:
        served = self.served.get(base_model)
        of_pools = [one for one in self.replicas.values() if served is not None and one.weights == served.weights]
        return [one for one in (*of_pools, *self._holders(base_model)) if one.accepting]

    @property
    @override
    def all_samplers(self) -> Sequence[SamplerHandle]:
        return [*self.replicas.values(), *(one for one in self.handles.values() if not one.suspended)]

    def _holders(self, base_model: str) -> list[FakeHandle]:
        served = self.served.get(base_model)
        return [one for one in self.handles.values() if served is not None and one.weights == served.weights]

    @override
    async def refresh(self) -> None:
        self.refreshes += 1
        if self.blind is not None:
            raise WorkerUnavailable(self.blind)
        self.replicas |= self.unseen
        self.unseen = {}

    @override
    async def provide(self, base_model: str, *, rank: int = 0, sampling: bool = False) -> str:
        self.slot_requests.append((base_model, rank, sampling))
        return self.capacity

    @override
    async def permanently_lost_reason(self, worker: Worker) -> str | None:
        return self.lost.get(worker.worker_id)

    @property
    @override
    def problem(self) -> str | None:
        return self.not_ready

    def cleanup(self) -> None:
        self._directory.cleanup()
