"""One replica of a pool: a pod that samples and keeps nothing, so that it has no epoch."""

from __future__ import annotations

from collections.abc import Callable

from typing_extensions import override

from tinsmith_server.errors import WorkerUnavailable
from tinsmith_server.fleet.base import SamplerClient, SamplerHandle, SamplerKind
from tinsmith_server.fleet.channels import TlsDirectory
from tinsmith_server.fleet.client import GrpcWorkerClient
from tinsmith_server.fleet.kubernetes.connecting import Connector, unreachable
from tinsmith_server.fleet.kubernetes.pool import Endpoint, Pool

TargetOf = Callable[[Endpoint], str]


class PoolReplica(SamplerHandle):
    """Connected to for as long as its pod is listed, also while it terminates: it may still have results."""

    def __init__(self, pool: Pool, endpoint: Endpoint, tls: TlsDirectory, target_of: TargetOf) -> None:
        self.pool = pool
        self.endpoint = endpoint
        self.architecture: str | None = None
        self._target_of = target_of
        self._connector = Connector(self.name, pool.uid, tls, self._target, self._greet)

    @property
    @override
    def sampler_id(self) -> str:
        return self.endpoint.pod_uid

    @property
    @override
    def name(self) -> str:
        return f"{self.pool.namespace}/{self.endpoint.pod_name}"

    @property
    @override
    def base_model(self) -> str:
        return self.pool.model

    @property
    @override
    def kind(self) -> SamplerKind:
        return "pool"

    @property
    @override
    def accepting(self) -> bool:
        return self.endpoint.at_work and not self.pool.deleted and self._connector.client is not None

    @property
    def may_answer(self) -> bool:
        """Not one that cannot be reached, and that its node has given up, too: it would be waited for until its pod
        is gone, which on a lost node is never."""
        return self.endpoint.at_work or self._connector.client is not None

    def update(self, pool: Pool, endpoint: Endpoint) -> None:
        """What the cluster says of it now."""
        if (pool, endpoint) != (self.pool, self.endpoint):
            self.pool, self.endpoint = pool, endpoint
            self._connector.look_again()

    @override
    async def connection(self, timeout_seconds: float) -> SamplerClient:
        client = await self._connector.connection(timeout_seconds)
        if client is not None:
            return client
        what = f"replica {self.endpoint.pod_name} of {self.pool.title}"
        if self.endpoint.serving:
            raise unreachable(what, self._connector.trouble)
        raise WorkerUnavailable(f"{what} does not answer just now")

    @override
    def running(self) -> SamplerClient | None:
        return self._connector.client

    async def close(self) -> None:
        await self._connector.close()

    def _target(self) -> str:
        return self._target_of(self.endpoint)

    async def _greet(self, client: GrpcWorkerClient) -> None:
        self.architecture = (await client.describe()).base_model.architecture or None
