"""What the services ask of a fleet, wherever its workers run."""

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

    `weights` is equal for names of the same base weights. A limit of None means that the worker says.
    `training` and `sampling` say whether there is, or may be made, anything that does it.
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
    """Where a worker streams its newest saves from.

    `target` is as gRPC wants it. Samplers in the same `network` may open the connection, and no others.
    """

    target: str
    worker_id: str
    network: str


class Changes:
    """Counts what happens, so that whoever looks first and waits afterwards misses nothing."""

    def __init__(self) -> None:
        self.count = 0
        self._next = asyncio.Event()

    def note(self) -> None:
        self.count += 1
        self._next.set()
        self._next = asyncio.Event()

    async def beyond(self, count: int) -> None:
        """Returns once more has happened than what was seen at `count`."""
        while self.count <= count:
            await self._next.wait()


class SamplerClient(Protocol):
    """What makes samples. Every method raises WorkerUnavailable when it cannot be reached, or takes no more."""

    async def sample(self, request: worker_pb2.SampleRequest, tenant: str) -> None:
        """Tenants share the sampler fairly. Raises TooManySamples when its queue is full."""

    async def prepare(self, adapter: worker_pb2.AdapterRef) -> None:
        """Samples of it are about to come. Raises WorkerError, also for a sampler of a release that takes no hints."""

    async def await_sample(self, request_id: str, timeout_seconds: float) -> worker_pb2.AwaitReply: ...
    async def await_samples(self, request: worker_pb2.AwaitSamplesRequest) -> worker_pb2.AwaitSamplesReply:
        """Raises Unprocessable for a sampler of a release that tells only of one sample at a time."""

    async def cancel_sample(self, request_id: str) -> None: ...
    async def render_prompt(self, request: worker_pb2.RenderPromptRequest, tenant: str) -> worker_pb2.RenderPromptReply:
        """Raises Unprocessable where the model's chat template refuses, or there is none, or nobody who knows it."""

    async def await_text(self, request_id: str, seen: int, timeout_seconds: float) -> worker_pb2.AwaitTextReply: ...
    async def describe(self) -> worker_pb2.DescribeReply: ...
    async def take_usage(self) -> worker_pb2.TakeUsageReply:
        """What it has counted since the last call, of whoever made it. Raises WorkerError where it counts nothing."""

    async def read_tokenizer(self, known_digest: str) -> worker_pb2.ReadTokenizerReply:
        """The base model's tokenizer; without files where they have this digest.

        Raises Unprocessable where there is none that may be given away.
        """

    async def timeline(self, session_id: str) -> worker_pb2.TimelineReply:
        """When the session's operations and samples came, began and ended. Raises likewise."""


class WorkerClient(SamplerClient, Protocol):
    """One activated instance of a worker."""

    async def submit(self, request: worker_pb2.SubmitRequest, tenant: str) -> worker_pb2.SubmitReply:
        """Returns, once the operation is on disk, its number and the epoch under which it was accepted.

        Tenants share the worker fairly.
        Raises ModelNotAtWorker, StorageFull (nothing was accepted), or StaleEpoch; and Unprocessable where the model's
        operations have numbers and this one has none, or the other way round.
        """

    async def await_result(self, model_id: str, seq_id: int, timeout_seconds: float) -> worker_pb2.AwaitReply: ...
    async def events(self, after_event_id: int, timeout_seconds: float) -> Sequence[worker_pb2.Event]: ...
    async def import_adapter(self, request: worker_pb2.ImportAdapterRequest) -> worker_pb2.ImportAdapterReply:
        """Makes a checkpoint of uploaded files. Raises Unprocessable where they are no adapter of the base model."""


SamplerKind = Literal["pool", "colocated"]
"""In the order in which samples are given to them: what only samples, then what also trains."""


class SamplerHandle(Protocol):
    """A place where samples are made, and kept in memory: a pool's replica, a process of this machine beside a worker,
    or a worker beside its training."""

    @property
    def sampler_id(self) -> str:
        """Of what keeps the samples: every server calls it the same."""

    @property
    def name(self) -> str:
        """What people call it."""

    @property
    def base_model(self) -> str:
        """The name that its base model is shown under, the first of several."""

    @property
    def kind(self) -> SamplerKind: ...

    @property
    def accepting(self) -> bool:
        """It may be given new samples."""

    async def connection(self, timeout_seconds: float) -> SamplerClient:
        """Raises WorkerUnavailable with the reason when it cannot be reached in time."""

    def running(self) -> SamplerClient | None:
        """The sampler if it is connected now; never starts one."""

    @property
    def outlives_connections(self) -> bool:
        """While it is not `running` it may have samples all the same, as before a server that has just started has
        connected to it; False: what does not run has none."""
        return True

    @property
    def takes_saves_in(self) -> str | None:
        """The network in which it can be told of a worker that streams saves; None: it reads the checkpoint root."""
        return None


class WorkerHandle(SamplerHandle, Protocol):
    """A worker's place in the fleet, whether or not it runs just now."""

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
        """Models that it may be given, parked ones too."""

    @property
    def leaving(self) -> str | None:
        """The reason for which it will be taken away for ever, as a clause; None while it stays. Its models must then
        be saved and released while it still runs."""

    @override
    async def connection(self, timeout_seconds: float) -> WorkerClient:
        """The running, activated worker; started at first use.

        Raises WorkerUnavailable with the reason when it is not ready in time, and WorkerUnstartable
        at once when its model directory or its flags are to blame.
        """

    @override
    def running(self) -> WorkerClient | None:
        """The worker if it is ready now; never starts one."""

    @property
    def saves(self) -> SavesAddress | None:
        """Where its newest saves are streamed from; None: nowhere just now."""
        return None

    @property
    def unavailable_reason(self) -> str | None:
        """Why it is not ready now, for those who wait for it; None while it is."""

    async def renew(self) -> None:
        """Activates the running instance anew, after its epoch turned out to be stale."""


class Fleet(Protocol):
    """Models and workers may come and go while it is open; `changes` counts that."""

    async def begin(self) -> None:
        """What can be done before there is a store: it runs beside the rest of the server's start.

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
        """Raises WorkerAbsent when there is no such worker just now."""

    def trainers(self, base_model: str, rank: int) -> Sequence[WorkerHandle]:
        """Those that may be given a new model of this LoRA rank, whether or not a slot is free."""

    def samplers(self, base_model: str, rank: int = 0) -> Sequence[SamplerHandle]:
        """Those that take new samples from the base model, and from adapters of this rank on it."""

    @property
    def all_samplers(self) -> Sequence[SamplerHandle]:
        """Whoever may still hold a sample that it took, whether or not it takes new ones."""

    async def refresh(self) -> None:
        """Makes up for changes that were missed. Raises WorkerUnavailable when it cannot be told what was."""

    async def provide(self, base_model: str, *, rank: int = 0, sampling: bool = False) -> str:
        """Sees to more capacity, where it can: for a model of this rank, or for samples.

        Returns what there is to wait for, or what a human has to do, in words for the one who waits.
        """

    async def permanently_lost_reason(self, worker: Worker) -> str | None:
        """Why this worker cannot come back, when that is certain; None while it may."""

    @property
    def problem(self) -> str | None:
        """Why the fleet cannot tell yet where its workers are; None when it can."""


def everything_of(fleet: Fleet) -> Sequence[SamplerHandle]:
    """Whatever may say how it is doing: the workers, and what only samples."""
    by_id: dict[str, SamplerHandle] = {one.sampler_id: one for one in fleet.workers}
    return list({**by_id, **{one.sampler_id: one for one in fleet.all_samplers}}.values())


def places_of(description: worker_pb2.DescribeReply) -> int:
    """Models that this worker takes. One of a release that parks none takes as many as it has slots."""
    return description.model_places or description.capabilities.adapter_slots


def share_weights(fleet: Fleet, one: str, other: str) -> bool:
    """Whether two names stand for the same base weights, so that an adapter of one fits the other."""
    first, second = fleet.model(one), fleet.model(other)
    return one == other or (first is not None and second is not None and first.weights == second.weights)
