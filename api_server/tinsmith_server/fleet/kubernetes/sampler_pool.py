"""What this server reads of a SamplerPool and of its endpoints, parsed at the border."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from tinsmith_server.fleet.kubernetes.api import Manifest
from tinsmith_server.fleet.kubernetes.training_session import ConditionPart, MetadataPart, ModelPart, Part
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
    conditions: tuple[ConditionPart, ...] = ()


class _PoolMetadata(MetadataPart):
    uid: str


class _SamplerPool(Part):
    metadata: _PoolMetadata
    spec: _SpecPart
    status: _StatusPart = _StatusPart()


@dataclass(frozen=True, slots=True)
class Pool:
    """A SamplerPool: any number of equal samplers of one base model."""

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

    @property
    def key(self) -> Key:
        return self.namespace, self.name

    @property
    def title(self) -> str:
        return f"SamplerPool {self.namespace}/{self.name}"

    def why_not_sampling(self) -> str:
        """For the one who waits, with what to do about it."""
        if self.deleted:
            return f"{self.title} is being deleted"
        if self.replicas == 0:
            return (
                f"{self.title} has no replicas; scale it up with: kubectl --namespace {self.namespace} "
                f"scale samplerpool {self.name} --replicas 1"
            )
        if self.ready:
            return f"{self.title} is ready, and its replicas are being connected to"
        return f"{self.title} is not ready: {self.message or 'its operator has not looked at it yet'}"


def parse_pool(manifest: Manifest) -> Pool:
    """Raises pydantic's ValidationError for what is no SamplerPool that we understand."""
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
    # An empty list of a slice without ready pods is null.
    endpoints: tuple[_EndpointPart, ...] | None = None
    ports: tuple[_PortPart, ...] | None = None


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One pod of a pool. `terminating`: it takes no new work, and keeps its results for a while."""

    pod_uid: str
    pod_name: str
    address: str
    port: int
    serving: bool
    terminating: bool

    @property
    def at_work(self) -> bool:
        """It may be given new work."""
        return self.serving and not self.terminating

    @property
    def target(self) -> str:
        """As gRPC wants it."""
        return f"[{self.address}]:{self.port}" if ":" in self.address else f"{self.address}:{self.port}"


@dataclass(frozen=True, slots=True)
class Slice:
    """A part of a pool's endpoints."""

    pool: Key
    address_type: str
    endpoints: tuple[Endpoint, ...]


def parse_slice(manifest: Manifest) -> Slice:
    """Raises pydantic's ValidationError for what is no EndpointSlice."""
    parsed = _EndpointSlice.model_validate(manifest)
    port = next((one.port for one in parsed.ports or () if one.name == PORT_NAME), None)
    endpoints = tuple(_endpoint(one, port) for one in parsed.endpoints or () if one.target_ref and port is not None)
    return Slice(
        (parsed.metadata.namespace, parsed.metadata.labels.get(POOL_LABEL, "")), parsed.address_type, endpoints
    )


def _endpoint(part: _EndpointPart, port: int) -> Endpoint:
    assert part.target_ref is not None
    said = part.conditions
    # The Service publishes pods that are not ready, and then calls every one of them "ready": "serving" tells.
    serving = said.serving if said.serving is not None else said.ready is not False
    return Endpoint(
        pod_uid=part.target_ref.uid,
        pod_name=part.target_ref.name,
        address=part.addresses[0],
        port=port,
        serving=serving,
        terminating=said.terminating is True,
    )


def endpoints_of(slices: Iterable[Slice], pool: Key) -> dict[str, Endpoint]:
    """By the pod's UID. A pod can be in two slices: of two address families, or while it moves between them."""
    own = sorted((one for one in slices if one.pool == pool), key=lambda one: one.address_type, reverse=True)
    return {endpoint.pod_uid: endpoint for one in own for endpoint in one.endpoints}
