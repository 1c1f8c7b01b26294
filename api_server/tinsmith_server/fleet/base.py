"""The interface between the services and a fleet, for any kind of fleet."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Literal, Protocol

from tinsmith_rpc import worker_pb2
from typing_extensions import override

from tinsmith_server.store.records import Worker

if TYPE_CHECKING:
    from tinsmith_server.store.store import Store


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A base model under the name that clients use. Any number of workers may serve a model.

    Two names of the same base weights have equal `weights`. If a limit is None, the worker decides. `training` is True
    if a worker for training exists or may be created; `sampling` is True if a sampler exists or may be created.
    """

    name: str
    weights: str
    architecture: str | None = None
    max_context_length: int | None = None
    max_rank: int | None = None
    max_sampling_rank: int | None = None
    training: bool = True
    sampling: bool = True


@dataclass(frozen=True, slots=True)
class SavesAddress:
    """The address from which a worker streams its newest saves.

    `target` is a gRPC target. Only samplers in the same `network` may connect to it.
    """

    target: str
    worker_id: str
    network: str


class Changes:
    """A counter of changes.

    A caller that reads the counter, then the state, and then waits for a change misses no change.
    """

    def __init__(self) -> None:
        self.count = 0
        self._next = asyncio.Event()

    def note(self) -> None:
        self.count += 1
        self._next.set()
        self._next = asyncio.Event()

    async def beyond(self, count: int) -> None:
        """Return when the counter is higher than `count`."""
        while self.count <= count:
            await self._next.wait()


class SamplerClient(Protocol):
    """A client of a sampler. Every method raises WorkerUnavailable if the sampler cannot be reached, or is stopping."""

    async def sample(self, request: worker_pb2.SampleRequest, tenant: str) -> None:
        """Submit a sample. Tenants share the sampler fairly. Raises TooManySamples if the sampler's queue is full."""

    async def prepare(self, adapter: worker_pb2.AdapterRef) -> None:
        """Announce samples of an adapter, so that the sampler can load the adapter.

        Raises WorkerError, also if the sampler does not support announcements.
        """

    async def await_sample(self, request_id: str, timeout_seconds: float) -> worker_pb2.AwaitReply: ...
    async def await_samples(self, request: worker_pb2.AwaitSamplesRequest) -> worker_pb2.AwaitSamplesReply:
        """Wait for ended samples. Raises Unprocessable for a sampler that cannot wait for several samples."""

    async def cancel_sample(self, request_id: str) -> None: ...
    async def render_prompt(self, request: worker_pb2.RenderPromptRequest, tenant: str) -> worker_pb2.RenderPromptReply:
        """Render a prompt.

        Raises Unprocessable if the model's chat template refuses the prompt, or if the model has no chat template.
        """

    async def await_text(self, request_id: str, seen: int, timeout_seconds: float) -> worker_pb2.AwaitTextReply: ...
    async def describe(self) -> worker_pb2.DescribeReply: ...
    async def take_usage(self) -> worker_pb2.TakeUsageReply:
        """Return the usage since the last call of this method by any server.

        Raises WorkerError if the worker counts no usage.
        """

    async def read_tokenizer(self, known_digest: str) -> worker_pb2.ReadTokenizerReply:
        """Return the base model's tokenizer.

        If `known_digest` is the digest of the tokenizer's files, the files are left out. Raises Unprocessable if the
        model has no tokenizer that clients may download.
        """

    async def timeline(self, session_id: str) -> worker_pb2.TimelineReply:
        """Return the times at which the session's operations and samples were accepted, started and ended.

        Raises the errors of `read_tokenizer`.
        """


class WorkerClient(SamplerClient, Protocol):
    """A client of one activated instance of a worker."""

    async def submit(
        self, request: worker_pb2.SubmitRequest, tenant: str, share_weight: float | None = None
    ) -> worker_pb2.SubmitReply:
        """Return the operation's number and epoch when the operation is on the worker's disk.

        Tenants share the worker fairly. A tenant with a share of weight 2 gets twice as much as others; None is 1.

        Raises ModelNotAtWorker, StorageFull if nothing was accepted, StaleEpoch, and Unprocessable if only some of the
        model's operations have a number from the client.
        """

    async def await_result(self, model_id: str, seq_id: int, timeout_seconds: float) -> worker_pb2.AwaitReply: ...
    async def events(self, after_event_id: int, timeout_seconds: float) -> Sequence[worker_pb2.Event]: ...
    async def import_adapter(self, request: worker_pb2.ImportAdapterRequest) -> worker_pb2.ImportAdapterReply:
        """Create a checkpoint from uploaded files.

        Raises Unprocessable if the files are not an adapter of the base model.
        """


SamplerKind = Literal["pool", "colocated"]
"""The kinds of samplers. Dedicated samplers are preferred to workers that also train."""


class SamplerHandle(Protocol):
    """A sampler, which keeps its samples in memory.

    A sampler is a replica of a pool, a process next to a local worker, or a worker that samples.
    """

    @property
    def sampler_id(self) -> str:
        """The id of the process that keeps the samples in memory. Every server sees the same ID."""

    @property
    def name(self) -> str:
        """The name in messages and metrics."""

    @property
    def base_model(self) -> str:
        """The base model's name for messages. If the model has several names, the first name is used."""

    @property
    def kind(self) -> SamplerKind: ...

    @property
    def accepting(self) -> bool:
        """True if the sampler takes new samples."""

    async def connection(self, timeout_seconds: float) -> SamplerClient:
        """Return a client of the sampler.

        Raises WorkerUnavailable with the reason if there is no connection before the timeout.
        """

    def running(self) -> SamplerClient | None:
        """Return a client if the sampler is connected now. This call does not start the sampler."""

    @property
    def outlives_connections(self) -> bool:
        """True if the sampler may hold samples while this server has no connection, for example after a restart."""
        return True

    @property
    def takes_saves_in(self) -> str | None:
        """The network in which the sampler can reach the workers that stream saves.

        None means that the sampler reads saves from the checkpoint root.
        """
        return None


@dataclass(frozen=True, slots=True)
class ScaledPool:
    """A pool of samplers, as its autoscaler sees it.

    `wanted_at` is the time of the latest sample that found no replica. `samplers` are the replicas that take samples.
    """

    title: str
    wanted_at: datetime | None
    samplers: Sequence[SamplerHandle]


class WorkerHandle(SamplerHandle, Protocol):
    """A worker of the fleet, running or not."""

    @property
    def worker_id(self) -> str: ...

    @property
    @override
    def sampler_id(self) -> str:
        return self.worker_id

    @property
    @override
    def kind(self) -> SamplerKind:
        return "colocated"

    @property
    def slots(self) -> int:
        """The number of models that the worker takes, including parked models."""

    @property
    def leaving(self) -> str | None:
        """The reason why the worker will be removed, as a clause, or None if no removal is planned.

        The worker's models must be saved and released before the worker stops.
        """

    @override
    async def connection(self, timeout_seconds: float) -> WorkerClient:
        """Return a client of the activated worker. The first call starts the worker.

        Raises WorkerUnavailable with the reason if the worker is not ready before the timeout. Raises WorkerUnstartable
        immediately if the worker's model directory or flags are the cause.
        """

    @override
    def running(self) -> WorkerClient | None:
        """Return a client if the worker is ready now. This call does not start the worker."""

    @property
    def saves(self) -> SavesAddress | None:
        """The address from which the worker streams its newest saves.

        None means that the worker streams no saves now.
        """
        return None

    @property
    def asleep(self) -> bool:
        """True if the worker was suspended because no client used it. A call of `connection` wakes it."""
        return False

    def note_bound(self) -> None:
        """Record that a model was bound to the worker, so that the worker is not taken for unused."""
        return

    @property
    def unavailable_reason(self) -> str | None:
        """The reason why the worker is not ready, or None if the worker is ready. Waiting clients see this text."""

    async def renew(self) -> None:
        """Activate the running instance again.

        Call this method after the worker has refused a call because of a stale epoch.
        """


class Fleet(Protocol):
    """The models and workers of a server.

    Models and workers may appear and disappear while the fleet is open, and `changes` counts these events.
    """

    async def begin(self) -> None:
        """Start everything that needs no store while the server is still starting. Raises StartupError."""

    async def open(self, store: Store) -> None: ...
    async def close(self) -> None: ...

    @property
    def changes(self) -> Changes: ...

    @property
    def models(self) -> Sequence[ServedModel]: ...

    def model(self, name: str) -> ServedModel | None: ...

    @property
    def workers(self) -> Sequence[WorkerHandle]: ...

    def worker(self, worker_id: str) -> WorkerHandle:
        """Return the worker with this id. Raises WorkerAbsent if the fleet has no worker with this ID now."""

    def trainers(self, base_model: str, rank: int) -> Sequence[WorkerHandle]:
        """Return the workers that take new models of this LoRA rank, whether or not a slot is free."""

    def samplers(self, base_model: str, rank: int = 0) -> Sequence[SamplerHandle]:
        """Return the samplers that take new samples of the base model, or of its adapters of this rank."""

    def want_samplers(self, base_model: str, rank: int = 0) -> None:
        """Wake the dedicated samplers of the base model, if no client used them or their autoscaler removed them."""
        return

    def scaled_pool(self, namespace: str, name: str) -> ScaledPool | None:
        """Return the pool, or None if there is no such pool, or if it is being deleted or past its deadline."""
        return None

    @property
    def all_samplers(self) -> Sequence[SamplerHandle]:
        """All samplers that may still hold a sample, including those that take no new samples."""

    async def refresh(self) -> None:
        """Read the state of the fleet again. Raises WorkerUnavailable if the state cannot be read."""

    async def provide(self, base_model: str, *, rank: int = 0, sampling: bool = False) -> str:
        """Request more capacity, if possible: for a model of this rank, or for samples.

        Returns a message that says what the caller is waiting for, or what an administrator must do.
        """

    async def permanently_lost_reason(self, worker: Worker) -> str | None:
        """Return the reason why this worker can never come back, or None if it may come back."""

    @property
    def problem(self) -> str | None:
        """The reason why the fleet does not know its workers yet, or None if the workers are known."""


def describable_handles(fleet: Fleet) -> Sequence[SamplerHandle]:
    """Return one handle for each worker and each sampler."""
    by_id: dict[str, SamplerHandle] = {one.sampler_id: one for one in fleet.workers}
    return list({**by_id, **{one.sampler_id: one for one in fleet.all_samplers}}.values())


def places_of(description: worker_pb2.DescribeReply) -> int:
    """Return the number of models that this worker accepts: its slots, or more if it parks models."""
    return description.model_places or description.capabilities.adapter_slots
