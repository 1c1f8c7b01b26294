"""One session's worker: connected to while it is ready, under the epoch of the instance that answers."""

from __future__ import annotations

import asyncio

from typing_extensions import override

from tinsmith_server.errors import WorkerUnavailable
from tinsmith_server.fleet.activation import activate
from tinsmith_server.fleet.base import EpochRegistry, WorkerClient, WorkerHandle
from tinsmith_server.fleet.channels import TlsDirectory
from tinsmith_server.fleet.client import GrpcWorkerClient
from tinsmith_server.fleet.kubernetes.connector import Connector, unreachable
from tinsmith_server.fleet.kubernetes.training_session import Session


class SessionHandle(WorkerHandle):
    """Every server keeps a connection of its own: several of them give one instance the same epoch."""

    def __init__(self, worker_id: str, session: Session, tls: TlsDirectory, epochs: EpochRegistry) -> None:
        self._worker_id = worker_id
        self._epochs = epochs
        self.session = session
        self.architecture: str | None = None
        self._renewal = asyncio.Lock()
        self._connector = Connector(session.title, worker_id, tls, self._endpoint, self._greet)

    @property
    @override
    def worker_id(self) -> str:
        return self._worker_id

    @property
    @override
    def name(self) -> str:
        return home_of(self.session)

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
    def slots(self) -> int | None:
        return self.session.spec.adapters.slots

    @property
    @override
    def leaving(self) -> bool:
        return self.session.leaving

    def update(self, session: Session) -> None:
        """What the cluster says of the session now."""
        if session != self.session:
            self.session = session
            self._connector.look_again()

    @override
    async def connection(self, timeout_seconds: float) -> WorkerClient:
        client = await self._connector.connection(timeout_seconds)
        if client is not None:
            return client
        if not self.session.at_work:
            raise WorkerUnavailable(self.session.why_not_at_work())
        raise unreachable(self.session.title, self._connector.trouble)

    @override
    def running(self) -> WorkerClient | None:
        return self._connector.client

    @override
    async def renew(self) -> None:
        async with self._renewal:
            if self._connector.client is not None:
                await activate(self._connector.client, self._worker_id, self._epochs)

    async def close(self) -> None:
        await self._connector.close()

    def _endpoint(self) -> str | None:
        # One that is leaving is not ready any more, and runs until its models are saved.
        return self.session.endpoint if self.session.ready or self.session.leaving else None

    async def _greet(self, client: GrpcWorkerClient) -> None:
        description = await activate(client, self._worker_id, self._epochs)
        self.architecture = description.base_model.architecture or None
        await self._epochs.note_home(self._worker_id, home_of(self.session))


def home_of(session: Session) -> str:
    """How the store remembers where a worker was last seen."""
    return f"{session.namespace}/{session.name}"
