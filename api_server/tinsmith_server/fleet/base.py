"""The interface of a fleet to the services, wherever its workers run."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from tinsmith_rpc import worker_pb2
from typing_extensions import override

from tinsmith_server.store.records import Worker

if TYPE_CHECKING:
    from tinsmith_server.store.store import Store


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A base model under the name that clients use. Any number of workers may hold it.

    `weights` is equal for names of the same base weights. A limit of None is left to the worker. `training` and
    `sampling` say whether a worker or sampler exists, or may be created, that does it.
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
    """A counter of changes, with which a caller can read state first and wait afterwards without missing a change."""

    def __init__(self) -> None:
        self.count = 0
        self._next = asyncio.Event()

    def note(self) -> None:
        self.count += 1
        self._next.set()
        self._next = asyncio.Event()

    async def beyond(self, count: int) -> None:
        """Return once the counter exceeds `count`."""
        while self.count <= count:
            await self._next.wait()


class SamplerClient(Protocol):
    """A client of a sampler. Every method raises WorkerUnavailable if the sampler cannot be reached, or is stopping."""

    async def sample(self, request: worker_pb2.SampleRequest, tenant: str) -> None:
        """Submit a sample. Tenants share the sampler fairly. Raises TooManySamples: its queue is full."""

    async def prepare(self, adapter: worker_pb2.AdapterRef) -> None:
        """Announce samples of an adapter, so that the sampler can load it.

        Raises WorkerError, also if it takes no hints.
        """

    async def await_sample(self, request_id: str, timeout_seconds: float) -> worker_pb2.AwaitReply: ...
    async def await_samples(self, request: worker_pb2.AwaitSamplesRequest) -> worker_pb2.AwaitSamplesReply:
        """Wait for ended samples. Raises Unprocessable for a sampler that cannot wait for several."""

    async def cancel_sample(self, request_id: str) -> None: ...
    async def render_prompt(self, request: worker_pb2.RenderPromptRequest, tenant: str) -> worker_pb2.RenderPromptReply:
        """Render a prompt. Raises Unprocessable: the model's chat template refuses it, or there is no template."""

    async def await_text(self, request_id: str, seen: int, timeout_seconds: float) -> worker_pb2.AwaitTextReply: ...
    async def describe(self) -> worker_pb2.DescribeReply: ...
    async def take_usage(self) -> worker_pb2.TakeUsageReply:
        """Return the usage counted since the last call by any server.

        Raises WorkerError for a worker that counts none.
        """

    async def read_tokenizer(self, known_digest: str) -> worker_pb2.ReadTokenizerReply:
        """Return the base model's tokenizer, without its files if they have this digest.

        Raises Unprocessable: there is none that may be given away.
        """

    async def timeline(self, session_id: str) -> worker_pb2.TimelineReply:
        """Return when the session's operations and samples were accepted, started and ended.

        Raises as `read_tokenizer`.
        """


class WorkerClient(SamplerClient, Protocol):
    """A client of one activated instance of a worker."""

    async def submit(self, request: worker_pb2.SubmitRequest, tenant: str) -> worker_pb2.SubmitReply:
        """Return the operation's number and the epoch of its acceptance, once it is on disk.

        Tenants share the worker fairly. Raises ModelNotAtWorker, StorageFull (nothing was accepted) and StaleEpoch; and
        Unprocessable if the client numbers some of the model's operations but not all.
        """

    async def await_result(self, model_id: str, seq_id: int, timeout_seconds: float) -> worker_pb2.AwaitReply: ...
    async def events(self, after_event_id: int, timeout_seconds: float) -> Sequence[worker_pb2.Event]: ...
    async def import_adapter(self, request: worker_pb2.ImportAdapterRequest) -> worker_pb2.ImportAdapterReply:
        """Create a checkpoint from uploaded files. Raises Unprocessable: they are no adapter of the base model."""


SamplerKind = Literal["pool", "colocated"]
"""The kinds in order of preference for samples: dedicated samplers, then workers that also train."""


class SamplerHandle(Protocol):
    """A sampler with its samples in memory: a pool's replica, a process next to a local worker, or a worker itself."""

    @property
    def sampler_id(self) -> str:
        """The id of the memory that keeps the samples; the same at every server."""

    @property
    def name(self) -> str:
        """The name in messages and metrics."""

    @property
    def base_model(self) -> str:
        """The displayed name of its base model: the first of several."""

    @property
    def kind(self) -> SamplerKind: ...

    @property
    def accepting(self) -> bool:
        """True if it takes new samples."""

    async def connection(self, timeout_seconds: float) -> SamplerClient:
        """Return a client. Raises WorkerUnavailable with the reason if there is none in time."""

    def running(self) -> SamplerClient | None:
        """Return a client if the sampler is connected now; never start it."""

    @property
    def outlives_connections(self) -> bool:
        """True if it may hold samples while it is not `running`, as before this server has connected to it."""
        return True

    @property
    def takes_saves_in(self) -> str | None:
        """The network in which it can reach workers that stream saves. None: it reads the checkpoint root."""
        return None


class WorkerHandle(SamplerHandle, Protocol):
    """A worker of the fleet, whether it runs or not."""

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
        """The number of models that it takes, including parked ones."""

    @property
    def leaving(self) -> str | None:
        """The reason for its permanent removal, as a clause; None while it stays.

        Its models must be saved and released while it still runs.
        """

    @override
    async def connection(self, timeout_seconds: float) -> WorkerClient:
        """Return a client of the activated worker, which is started at first use.

        Raises WorkerUnavailable with the reason if it is not ready in time, and WorkerUnstartable at once if its model
        directory or its flags are the cause.
        """

    @override
    def running(self) -> WorkerClient | None:
        """Return a client if the worker is ready now; never start it."""

    @property
    def saves(self) -> SavesAddress | None:
        """The address from which it streams its newest saves. None: it streams none at present."""
        return None

    @property
    def unavailable_reason(self) -> str | None:
        """The reason why it is not ready, for waiting clients; None while it is."""

    async def renew(self) -> None:
        """Activate the running instance again, after its epoch turned out to be stale."""


class Fleet(Protocol):
    """The models and workers of a server. They may come and go while it is open; `changes` counts that."""

    async def begin(self) -> None:
        """Start what needs no store, in parallel to the rest of the server's start.

        Raises StartupError.
        """

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
        """Return the worker of this id. Raises WorkerAbsent: there is none at present."""

    def trainers(self, base_model: str, rank: int) -> Sequence[WorkerHandle]:
        """Return the workers that take new models of this LoRA rank, whether or not a slot is free."""

    def samplers(self, base_model: str, rank: int = 0) -> Sequence[SamplerHandle]:
        """Return the samplers that take new samples of the base model, or of adapters of this rank on it."""

    @property
    def all_samplers(self) -> Sequence[SamplerHandle]:
        """Every sampler that may still hold a sample, whether or not it takes new ones."""

    async def refresh(self) -> None:
        """Read the state of the fleet again. Raises WorkerUnavailable: it cannot be read."""

    async def provide(self, base_model: str, *, rank: int = 0, sampling: bool = False) -> str:
        """Request more capacity if possible: for a model of this rank, or for samples.

        Returns what the caller is waiting for, or what an administrator has to do, for display.
        """

    async def permanently_lost_reason(self, worker: Worker) -> str | None:
        """Return why this worker can never come back. None: it may."""

    @property
    def problem(self) -> str | None:
        """The reason why the fleet does not know its workers yet; None if it does."""


def describable_handles(fleet: Fleet) -> Sequence[SamplerHandle]:
    """Return everything that describes itself: the workers, and the samplers."""
    by_id: dict[str, SamplerHandle] = {one.sampler_id: one for one in fleet.workers}
    return list({**by_id, **{one.sampler_id: one for one in fleet.all_samplers}}.values())


def places_of(description: worker_pb2.DescribeReply) -> int:
    """Return the number of models that this worker takes: its slots, unless it parks models and says more."""
    return description.model_places or description.capabilities.adapter_slots


def share_weights(fleet: Fleet, one: str, other: str) -> bool:
    """Return whether two names stand for the same base weights, so that an adapter of one fits the other."""
    first, second = fleet.model(one), fleet.model(other)
    return one == other or (first is not None and second is not None and first.weights == second.weights)
