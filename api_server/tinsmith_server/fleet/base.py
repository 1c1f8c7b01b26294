"""What the services ask of a fleet, wherever its workers run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tinsmith_rpc import worker_pb2


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A base model under the name that clients use. Several names may share one worker."""

    name: str
    worker_id: str
    architecture: str | None
    max_context_length: int | None


class EpochRow(Protocol):
    """What the store knows of a worker."""

    @property
    def epoch(self) -> int: ...
    @property
    def instance_id(self) -> str: ...


class EpochRegistry(Protocol):
    """The part of the store that a fleet needs: the owner of every worker's epoch."""

    async def get_worker(self, worker_id: str) -> EpochRow: ...
    async def raise_epoch(self, worker_id: str, expected_epoch: int, instance_id: str) -> EpochRow | None: ...


class WorkerClient(Protocol):
    """One activated instance of a worker. Every method raises WorkerUnavailable when it cannot be reached."""

    async def submit(self, request: worker_pb2.SubmitRequest) -> int:
        """Returns, once the operation is on disk, the epoch under which it was accepted.

        Raises ModelNotAtWorker, StorageFull (nothing was accepted), or StaleEpoch.
        """

    async def await_result(self, model_id: str, seq_id: int, timeout_seconds: float) -> worker_pb2.AwaitReply: ...

    async def sample(self, request: worker_pb2.SampleRequest) -> None:
        """Raises TooManySamples when the sampler's queue is full."""

    async def await_sample(self, request_id: str, timeout_seconds: float) -> worker_pb2.AwaitReply: ...
    async def cancel_sample(self, request_id: str) -> None: ...
    async def events(self, after_event_id: int, timeout_seconds: float) -> Sequence[worker_pb2.Event]: ...
    async def describe(self) -> worker_pb2.DescribeReply: ...


class WorkerHandle(Protocol):
    """A worker's place in the fleet, whether or not it runs just now."""

    @property
    def worker_id(self) -> str: ...

    async def connection(self, timeout_seconds: float) -> WorkerClient:
        """The running, activated worker; started at first use.

        Raises WorkerUnavailable with the reason when it is not ready in time, and ModelUnloadable
        at once when its model directory is to blame.
        """

    def running(self) -> WorkerClient | None:
        """The worker if it is ready now; never starts one."""

    async def renew(self) -> None:
        """Activates the running instance anew, after its epoch turned out to be stale."""


class Fleet(Protocol):
    async def open(self, epochs: EpochRegistry) -> None: ...
    async def close(self) -> None: ...

    @property
    def models(self) -> Sequence[ServedModel]: ...

    def model(self, name: str) -> ServedModel | None: ...

    @property
    def workers(self) -> Sequence[WorkerHandle]: ...

    def worker(self, worker_id: str) -> WorkerHandle:
        """Raises WorkerUnavailable when no served model belongs to this worker."""
