"""KEDA's external scaler protocol: the gRPC service by which KEDA scales SamplerPools."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias

import grpc
from tinsmith_rpc import external_scaler_pb2 as scaler_pb2
from tinsmith_rpc import external_scaler_pb2_grpc
from typing_extensions import override

from tinsmith_server.errors import NotFound, StartupError, TinsmithError, WorkerError, WorkerUnavailable
from tinsmith_server.fleet.channels import TlsDirectory
from tinsmith_server.services.pool_demand import PoolDemand, PoolLoad
from tinsmith_server.settings import Settings

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

STOP_SECONDS = 1.0
POOL = "pool"
METRICS: Mapping[str, Callable[[PoolLoad], float]] = {
    "unfinishedSamples": lambda load: load.unfinished_samples,
    "oldestSampleSeconds": lambda load: load.oldest_sample_seconds,
    "tokensPerSecond": lambda load: load.tokens_per_second,
}
"""The metrics by the names of their targets in the trigger's metadata."""
READ_BY_KEDA = frozenset({"scalerAddress", "enableTLS", "unsafeSsl", "caCert", "tlsClientCert", "tlsClientKey"})


class TriggerInvalid(TinsmithError):
    """The metadata of a trigger is invalid."""


@dataclass(frozen=True, slots=True)
class Trigger:
    """A trigger of a ScaledObject: the pool to scale, and the targets by metric.

    The pool is in the ScaledObject's namespace, because a ScaledObject scales nothing elsewhere.
    """

    namespace: str
    pool: str
    targets: Mapping[str, float]


def parse_trigger(reference: scaler_pb2.ScaledObjectRef) -> Trigger:
    """Return the trigger. Raises TriggerInvalid with the name of the invalid metadata."""
    metadata = dict(reference.scaler_metadata)
    unknown = metadata.keys() - METRICS.keys() - READ_BY_KEDA - {POOL}
    if unknown:
        raise TriggerInvalid(f"metadata {min(unknown)!r} is unknown; the metadata are {', '.join([POOL, *METRICS])}")
    if not metadata.get(POOL):
        raise TriggerInvalid(f"metadata {POOL!r} is missing; set it to the name of the SamplerPool")
    targets = {name: _target(name, metadata[name]) for name in METRICS if name in metadata}
    if not targets:
        raise TriggerInvalid(f"no target is set; set at least one of the metadata {', '.join(METRICS)}")
    return Trigger(reference.namespace, metadata[POOL], targets)


def _target(name: str, text: str) -> float:
    try:
        target = float(text)
    except ValueError:
        target = math.nan
    if not 0 < target < math.inf:
        raise TriggerInvalid(f"metadata {name!r} is {text!r}; set it to a number above 0")
    return target


class ExternalScaler(external_scaler_pb2_grpc.ExternalScalerServicer):
    """The gRPC service. Every call is about one ScaledObject's trigger."""

    def __init__(self, demand: PoolDemand) -> None:
        self._demand = demand

    @override
    async def IsActive(self, request: scaler_pb2.ScaledObjectRef, context: Context) -> scaler_pb2.IsActiveResponse:
        try:
            trigger = parse_trigger(request)
            is_active = await self._demand.is_active(trigger.namespace, trigger.pool)
        except TinsmithError as error:
            await _abort(context, error)
        return scaler_pb2.IsActiveResponse(result=is_active)

    @override
    async def StreamIsActive(
        self, request: scaler_pb2.ScaledObjectRef, context: Context
    ) -> AsyncIterator[scaler_pb2.IsActiveResponse]:
        """Say when a pool is wanted. KEDA finds out by `IsActive` when the pool is no longer used."""
        try:
            trigger = parse_trigger(request)
            async for _ in self._demand.wants(trigger.namespace, trigger.pool):
                yield scaler_pb2.IsActiveResponse(result=True)
        except TinsmithError as error:
            await _abort(context, error)

    @override
    async def GetMetricSpec(
        self, request: scaler_pb2.ScaledObjectRef, context: Context
    ) -> scaler_pb2.GetMetricSpecResponse:
        try:
            trigger = parse_trigger(request)
            self._demand.check(trigger.namespace, trigger.pool)
        except TinsmithError as error:
            await _abort(context, error)
        specs = [
            scaler_pb2.MetricSpec(metric_name=name, target_size=math.ceil(target), target_size_float=target)
            for name, target in trigger.targets.items()
        ]
        return scaler_pb2.GetMetricSpecResponse(metric_specs=specs)

    @override
    async def GetMetrics(
        self, request: scaler_pb2.GetMetricsRequest, context: Context
    ) -> scaler_pb2.GetMetricsResponse:
        try:
            trigger = parse_trigger(request.scaled_object_ref)
            if request.metric_name not in trigger.targets:
                raise TriggerInvalid(f"the trigger has no target for the metric {request.metric_name!r}")
            load = await self._demand.load(trigger.namespace, trigger.pool)
        except TinsmithError as error:
            await _abort(context, error)
        value = METRICS[request.metric_name](load)
        measured = scaler_pb2.MetricValue(
            metric_name=request.metric_name, metric_value=round(value), metric_value_float=value
        )
        return scaler_pb2.GetMetricsResponse(metric_values=[measured])


async def _abort(context: Context, error: TinsmithError) -> NoReturn:
    """End the call with the error's message. Other errors are not the caller's, and gRPC reports them as UNKNOWN."""
    code = grpc.StatusCode.INTERNAL
    if isinstance(error, TriggerInvalid):
        code = grpc.StatusCode.INVALID_ARGUMENT
    elif isinstance(error, NotFound):
        code = grpc.StatusCode.NOT_FOUND
    elif isinstance(error, WorkerError):
        code = grpc.StatusCode.UNAVAILABLE
    await context.abort(code, str(error))


@asynccontextmanager
async def serving_scaler(settings: Settings, demand: PoolDemand) -> AsyncIterator[None]:
    """Serve the protocol on `scaler_port`, if it is set, while the context is open. Raises StartupError."""
    if settings.scaler_port is None:
        yield
        return
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    external_scaler_pb2_grpc.add_ExternalScalerServicer_to_server(ExternalScaler(demand), server)
    _listen(server, settings, settings.scaler_port)
    await server.start()
    try:
        yield
    finally:
        # KEDA opens a stream that has ended again after 2 s, and a stream that has failed after up to a minute.
        demand.close()
        await server.stop(STOP_SECONDS)


def _listen(server: grpc.aio.Server, settings: Settings, port: int) -> None:
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    target = f"{host}:{port}"
    try:
        if settings.scaler_tls_directory is None:
            server.add_insecure_port(target)
        else:
            server.add_secure_port(target, TlsDirectory(settings.scaler_tls_directory).server_credentials())
    except WorkerUnavailable as error:
        raise StartupError(f"scaler_tls_directory: {error.__cause__}") from error
    except RuntimeError as error:
        raise StartupError(f"cannot listen on {target}; set scaler_port to another port ({error})") from error
