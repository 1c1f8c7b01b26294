"""The handle of a session's worker.

The handle is connected while the worker is ready, under the epoch of the running instance.
"""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

from typing_extensions import override

from tinsmith_server.errors import WorkerUnavailable
from tinsmith_server.fleet.activation import ActivatedHandle
from tinsmith_server.fleet.base import SavesAddress, places_of
from tinsmith_server.fleet.channels import TlsDirectory
from tinsmith_server.fleet.client import GrpcWorkerClient
from tinsmith_server.fleet.kubernetes.api import SESSIONS
from tinsmith_server.fleet.kubernetes.connector import ConnectedHandle, Connector, unreachable
from tinsmith_server.fleet.kubernetes.training_session import TrainingSession
from tinsmith_server.fleet.kubernetes.waking import Waker

if TYPE_CHECKING:
    from tinsmith_server.store.store import Store


class SessionHandle(ConnectedHandle, ActivatedHandle):
    """A handle of a session's worker.

    Each server has its own connection, but all servers give the same instance the same epoch.
    """

    def __init__(
        self,
        worker_id: str,
        session: TrainingSession,
        tls: TlsDirectory,
        epochs: Store,
        cluster: str,
        waker: Waker,
    ) -> None:
        """Prepare the connection.

        The store records the worker's location: `cluster`, namespace and name.
        """
        super().__init__(worker_id)
        self._epochs = epochs
        self._waker = waker
        self._cluster = cluster
        self.session = session
        self.architecture: str | None = None
        self._places = 0  # unknown until the worker has described itself
        self._saves: SavesAddress | None = None
        self._connector = Connector(session.title, worker_id, tls, self._endpoint, self._greet)

    @property
    @override
    def name(self) -> str:
        return f"{self.session.namespace}/{self.session.name}"

    @property
    @override
    def base_model(self) -> str:
        return self.session.model

    @property
    @override
    def accepting(self) -> bool:
        return self.session.at_work and self.session.samples

    @property
    @override
    def slots(self) -> int:
        return self._places or self.session.spec.adapters.slots

    @property
    @override
    def leaving(self) -> str | None:
        return f"{self.session.title} was deleted" if self.session.leaving else None

    @property
    @override
    def saves(self) -> SavesAddress | None:
        return self._saves if self.running() else None

    @property
    @override
    def unavailable_reason(self) -> str | None:
        return None if self.running() else str(self._why_not())

    @override
    async def connection(self, timeout_seconds: float) -> GrpcWorkerClient:
        """Return a client, and wake the session if it is suspended because it was idle.

        Callers that need no worker that is suspended, such as the collection of usage, call `running`. A worker that
        still stops is not woken: our own poll for its events ends then, and refused clients come again.
        """
        if self.asleep and self.running() is None:
            self._waker.wake(SESSIONS, self.session)
        return await super().connection(timeout_seconds)

    @property
    @override
    def asleep(self) -> bool:
        return self.session.asleep

    @override
    def note_bound(self) -> None:
        """Begin the time until an idle deletion anew.

        The last report before a suspension may be older than the model, and would allow the deletion.
        """
        if self.session.spec.idle is not None and self.session.spec.idle.delete_after_seconds is not None:
            self._waker.note_use(SESSIONS, self.session.key)

    def update(self, session: TrainingSession) -> None:
        """Update the handle with the cluster's current state."""
        if session != self.session:
            self.session = session
            self._connector.note_change()

    @override
    def _why_not(self) -> WorkerUnavailable:
        if not self.session.at_work:
            return WorkerUnavailable(self.session.unavailable_reason_text())
        return unreachable(self.session.title, self._connector.failure)

    def _endpoint(self) -> str | None:
        # A worker in removal is no longer ready, but runs until its models are saved.
        return self.session.endpoint if self.session.ready or self.session.leaving else None

    async def _greet(self, client: GrpcWorkerClient) -> None:
        description = await self._activate(client)
        self.architecture = description.base_model.architecture or None
        self._places = places_of(description)
        self._saves = await self._saves_address() if description.streams_saves else None
        await self._epochs.record_home(self._worker_id, str(Home.of(self.session, self._cluster)))

    async def _saves_address(self) -> SavesAddress | None:
        """Return the address with an IP instead of a host name, because a sampler may reach no name server."""
        target = await numbered(self.session.endpoint or "")
        return SavesAddress(target, self._worker_id, self.session.namespace) if target else None


async def numbered(target: str) -> str | None:
    """Return the target with an IP address, or None if the host name cannot be resolved."""
    host, _, port = target.rpartition(":")
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
    except OSError:
        return None
    address = str(found[0][4][0])
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


@dataclass(frozen=True, slots=True)
class Home:
    """The last known location of a worker, in the form that the store records.

    Another cluster may have a namespace of the same name. A server in another cluster that uses the same store finds no
    claim of the worker, but must not consider the worker lost.
    """

    namespace: str
    name: str
    cluster: str

    @classmethod
    def of(cls, session: TrainingSession, cluster: str) -> Home:
        return cls(session.namespace, session.name, cluster)

    @classmethod
    def parse(cls, text: str) -> Home:
        place, _, cluster = text.partition("@")
        namespace, _, name = place.partition("/")
        return cls(namespace, name, cluster)

    @override
    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}@{self.cluster}"
