"""SamplerPools: the fields of pools and endpoints that this server reads, and the connections to replicas."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Literal, TypeAlias

from typing_extensions import override

from tinsmith_server.errors import WorkerUnavailable
from tinsmith_server.fleet.base import SamplerHandle, SamplerKind
from tinsmith_server.fleet.channels import TlsDirectory
from tinsmith_server.fleet.client import GrpcWorkerClient
from tinsmith_server.fleet.kubernetes.api import Manifest
from tinsmith_server.fleet.kubernetes.connector import ConnectedHandle, Connector, unreachable
from tinsmith_server.fleet.kubernetes.training_session import (
    DEADLINE_EXCEEDED,
    ConditionPart,
    IdlePart,
    MetadataPart,
    ModelPart,
    Part,
)
from tinsmith_server.fleet.kubernetes.watching import Key

POOL_LABEL = "tinsmith.dev/pool"
PORT_NAME = "rpc"
DEFAULT_MAX_RANK = 128


class _AdaptersPart(Part):
    max_rank: int = DEFAULT_MAX_RANK


class _SpecPart(Part):
    model: ModelPart
    adapters: _AdaptersPart = _AdaptersPart()
    max_sequence_length: int | None = None
    replicas: int = 1


class _StatusPart(Part):
    idle: IdlePart = IdlePart()
    wanted_time: datetime | None = None
    conditions: tuple[ConditionPart, ...] = ()


class _PoolMetadata(MetadataPart):
    uid: str


class _SamplerPool(Part):
    metadata: _PoolMetadata
    spec: _SpecPart
    status: _StatusPart = _StatusPart()


@dataclass(frozen=True, slots=True)
class Pool:
    """A SamplerPool: any number of identical samplers of one base model."""

    name: str
    namespace: str
    uid: str
    model: str
    max_rank: int
    max_sequence_length: int | None
    replicas: int
    deleted: bool
    ready: bool
    message: str
    suspended_at: datetime | None = None
    wanted_at: datetime | None = None
    is_past_deadline: bool = False

    @property
    def key(self) -> Key:
        return self.namespace, self.name

    @property
    def title(self) -> str:
        return f"SamplerPool {self.namespace}/{self.name}"

    @property
    def asleep(self) -> bool:
        """True if the pool is suspended because it was idle, and wakes at the next sample."""
        return self.suspended_at is not None and self.replicas > 0 and not (self.deleted or self.is_past_deadline)

    def not_sampling_reason(self) -> str:
        """Return why the pool does not sample, and what to do. Waiting clients see this text."""
        if self.deleted:
            return f"{self.title} is being deleted"
        if self.replicas == 0:
            return (
                f"{self.title} has no replicas; if it has no autoscaler, scale it up with: kubectl --namespace "
                f"{self.namespace} scale samplerpool {self.name} --replicas 1"
            )
        if self.asleep:
            return f"waking sampler pool {self.name}: no client has used {self.title} for some time"
        if self.ready:
            return f"{self.title} is ready; waiting for the connections to its replicas"
        return f"{self.title} is not ready: {self.message or 'its operator has not reconciled it yet'}"


def parse_pool(manifest: Manifest) -> Pool:
    """Return the pool. Raises pydantic's ValidationError for an invalid object."""
    parsed = _SamplerPool.model_validate(manifest)
    ready = next((one for one in parsed.status.conditions if one.type == "Ready"), None)
    return Pool(
        name=parsed.metadata.name,
        namespace=parsed.metadata.namespace,
        uid=parsed.metadata.uid,
        model=parsed.spec.model.name,
        max_rank=parsed.spec.adapters.max_rank,
        max_sequence_length=parsed.spec.max_sequence_length,
        replicas=parsed.spec.replicas,
        deleted=parsed.metadata.deletion_timestamp is not None,
        ready=ready is not None and ready.status == "True",
        message=ready.message.rstrip(".") if ready is not None else "",
        suspended_at=parsed.status.idle.suspended_time,
        wanted_at=parsed.status.wanted_time,
        is_past_deadline=ready is not None and ready.reason == DEADLINE_EXCEEDED,
    )


class _TargetPart(Part):
    name: str = ""
    uid: str


class _ConditionsPart(Part):
    ready: bool | None = None
    serving: bool | None = None
    terminating: bool | None = None


class _EndpointPart(Part):
    addresses: tuple[str, ...]
    conditions: _ConditionsPart = _ConditionsPart()
    target_ref: _TargetPart | None = None


class _PortPart(Part):
    name: str | None = None
    port: int | None = None


class _EndpointSlice(Part):
    metadata: MetadataPart
    address_type: Literal["IPv4", "IPv6", "FQDN"]
    # In a slice without ready pods, the list is null.
    endpoints: tuple[_EndpointPart, ...] | None = None
    ports: tuple[_PortPart, ...] | None = None


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A pod of a pool. A pod that is `terminating` takes no new samples, but keeps its results for some time."""

    pod_uid: str
    pod_name: str
    address: str
    port: int
    serving: bool
    terminating: bool

    @property
    def at_work(self) -> bool:
        """True if the pod takes new samples."""
        return self.serving and not self.terminating

    @property
    def target(self) -> str:
        """The address of the gRPC server."""
        return f"[{self.address}]:{self.port}" if ":" in self.address else f"{self.address}:{self.port}"


@dataclass(frozen=True, slots=True)
class Slice:
    """A part of a pool's endpoints."""

    pool: Key
    address_type: str
    endpoints: tuple[Endpoint, ...]


def parse_slice(manifest: Manifest) -> Slice:
    """Return the slice. Raises pydantic's ValidationError for an invalid object."""
    parsed = _EndpointSlice.model_validate(manifest)
    port = next((one.port for one in parsed.ports or () if one.name == PORT_NAME), None)
    endpoints = tuple(_endpoint(one, port) for one in parsed.endpoints or () if one.target_ref and port is not None)
    return Slice(
        (parsed.metadata.namespace, parsed.metadata.labels.get(POOL_LABEL, "")), parsed.address_type, endpoints
    )


def _endpoint(part: _EndpointPart, port: int) -> Endpoint:
    assert part.target_ref is not None
    conditions = part.conditions
    # The Service publishes pods that are not ready, and marks all of them as "ready". Only "serving" shows which pods
    # are ready.
    serving = conditions.serving if conditions.serving is not None else conditions.ready is not False
    return Endpoint(
        pod_uid=part.target_ref.uid,
        pod_name=part.target_ref.name,
        address=part.addresses[0],
        port=port,
        serving=serving,
        terminating=conditions.terminating is True,
    )


def endpoints_of(slices: Iterable[Slice], pool: Key) -> dict[str, Endpoint]:
    """Return the endpoints by pod UID.

    A pod can be in two slices: in one slice for each address family, or in the old and the new slice during a move.
    """
    own = sorted((one for one in slices if one.pool == pool), key=lambda one: one.address_type, reverse=True)
    return {endpoint.pod_uid: endpoint for one in own for endpoint in one.endpoints}


TargetOf = Callable[[Endpoint], str]


class PoolReplica(ConnectedHandle, SamplerHandle):
    """A pod of a pool.

    The replica stays connected as long as the pod is listed, even while the pod terminates, because the pod may still
    have results.
    """

    def __init__(self, pool: Pool, endpoint: Endpoint, tls: TlsDirectory, target_of: TargetOf) -> None:
        self.pool = pool
        self.endpoint = endpoint
        self.architecture: str | None = None
        self._target_of = target_of
        self._takes_saves = False  # unknown until the replica has described itself
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
    @override
    def takes_saves_in(self) -> str | None:
        return self.pool.namespace if self._takes_saves else None

    @property
    def may_answer(self) -> bool:
        """True if the pod may still answer.

        The pods of a lost node are never removed. So this server does not wait for a pod that is neither ready nor
        connected.
        """
        return self.endpoint.at_work or self._connector.client is not None

    def update(self, pool: Pool, endpoint: Endpoint) -> None:
        """Update the handle with the cluster's current state."""
        if (pool, endpoint) != (self.pool, self.endpoint):
            self.pool, self.endpoint = pool, endpoint
            self._connector.note_change()

    @override
    def _why_not(self) -> WorkerUnavailable:
        what = f"replica {self.endpoint.pod_name} of {self.pool.title}"
        if self.endpoint.serving:
            return unreachable(what, self._connector.failure)
        return WorkerUnavailable(f"{what} does not answer at present")

    def _target(self) -> str:
        return self._target_of(self.endpoint)

    async def _greet(self, client: GrpcWorkerClient) -> None:
        description = await client.describe()
        self.architecture = description.base_model.architecture or None
        self._takes_saves = description.streams_saves


PoolEndpoint: TypeAlias = tuple[Pool, Endpoint]


class Pools:
    """The replicas of all pools, by the UIDs of the pods.

    A pod counts as a replica from its first address until the pod is no longer listed.
    """

    def __init__(self, tls: TlsDirectory, target_of: TargetOf, close: Callable[[PoolReplica], None]) -> None:
        """Start with no replicas.

        `close` is called for a replica that is no longer listed.
        """
        self._tls = tls
        self._target_of = target_of
        self._close = close
        self._pools: Mapping[Key, Pool] = {}
        self._replicas: dict[str, PoolReplica] = {}

    @property
    def replicas(self) -> Sequence[PoolReplica]:
        return list(self._replicas.values())

    @property
    def pools(self) -> Sequence[Pool]:
        """The pools that are not being deleted."""
        return [pool for pool in self._pools.values() if not pool.deleted]

    def take(self, pools: Mapping[Key, Pool], slices: Iterable[Slice]) -> None:
        """Update pools and replicas from the cluster's new state."""
        self._pools = pools
        present = dict(self._parts(tuple(slices)))
        for pod_uid, known in list(self._replicas.items()):
            # A pod of another pool has another certificate, so its connection must be opened again.
            if pod_uid not in present or present[pod_uid][0].uid != known.pool.uid:
                self._close(self._replicas.pop(pod_uid))
        for pod_uid, (pool, endpoint) in present.items():
            if pod_uid in self._replicas:
                self._replicas[pod_uid].update(pool, endpoint)
            else:
                self._replicas[pod_uid] = PoolReplica(pool, endpoint, self._tls, self._target_of)

    def replicas_for(self, base_model: str, rank: int) -> Sequence[PoolReplica]:
        """Return the replicas that take new samples of adapters of this rank."""
        suiting = (one for one in self._replicas.values() if one.base_model == base_model)
        return [one for one in suiting if one.accepting and rank <= one.pool.max_rank]

    def suitable(self, base_model: str, rank: int) -> Sequence[Pool]:
        """Return the pools that sample adapters of this rank, whether or not they have replicas."""
        return [pool for pool in self.pools if pool.model == base_model and rank <= pool.max_rank]

    def are_waking(self, base_model: str, rank: int) -> bool:
        """Return whether a suitable pool wakes from a suspension because of idleness."""
        return any(pool.asleep for pool in self.suitable(base_model, rank))

    def why_none(self, base_model: str, rank: int) -> str | None:
        """Return why no pool can sample, or None if no pool is configured for this base model and rank."""
        own = self.suitable(base_model, rank)
        # A pool with replicas is more likely to be ready soon than a pool that was scaled to zero.
        best = max(own, key=lambda pool: pool.replicas > 0, default=None)
        return best.not_sampling_reason() if best is not None else None

    def _parts(self, slices: Sequence[Slice]) -> Iterator[tuple[str, PoolEndpoint]]:
        for key in {one.pool for one in slices}:
            pool = self._pools.get(key)
            for pod_uid, endpoint in endpoints_of(slices, key).items():
                known = self._replicas.get(pod_uid)
                if pool is not None and (known is None or known.pool.uid == pool.uid or not _stays(known, endpoint)):
                    yield pod_uid, (pool, endpoint)
                elif known is not None:
                    # The pool is deleted and its pods terminate. Clients can still fetch their results.
                    yield pod_uid, (replace(known.pool, deleted=True), endpoint)


def _stays(known: PoolReplica, endpoint: Endpoint) -> bool:
    """Return whether the pod still belongs to its pool, and not to a newer pool of the same name.

    A newer pool's pod can be listed before the pool itself. A connected pod has proved its identity by its certificate,
    and a terminating pod belongs to the old pool.
    """
    return endpoint.terminating or known.running() is not None
