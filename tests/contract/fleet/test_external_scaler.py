"""KEDA's external scaler protocol: what an API server says of a pool, and the first sample of a pool at zero."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeAlias

import grpc
import pytest
from support.certificates import CLIENT, SERVER, Authority, mount_secret
from support.server.fleet_under_test import START_SECONDS
from support.server.http_server import API_KEY, TestedServer, running_server
from support.server.operator_stand_in import StandInOperator, StandInReplica, reached_at
from testcluster.ports import free_port
from tinsmith_rpc import external_scaler_pb2 as scaler_pb2
from tinsmith_rpc import external_scaler_pb2_grpc, worker_pb2
from tinsmith_server.errors import StartupError
from tinsmith_server.fleet.kubernetes.fleet import KubernetesFleet
from tinsmith_server.settings import Settings

Stub: TypeAlias = "external_scaler_pb2_grpc.ExternalScalerAsyncStub"
NAME = "scaler.tinsmith.internal"


@asynccontextmanager
async def serving(settings: Settings, **changes: Any) -> AsyncIterator[tuple[TestedServer, Stub]]:
    """Serve with a scaler port, and yield KEDA's client of this port, too."""
    port = free_port()
    values = {**settings.model_dump(), "api_key": API_KEY, "scaler_port": port, **changes}
    changed = Settings(**values)
    async with (
        running_server(changed, KubernetesFleet(changed, reached_at)) as server,
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        yield server, external_scaler_pb2_grpc.ExternalScalerStub(channel)


def reference(operator: StandInOperator, pool: str = "fast", **targets: str) -> scaler_pb2.ScaledObjectRef:
    metadata = {"scalerAddress": "server:9092", "pool": pool, **(targets or {"unfinishedSamples": "4"})}
    return scaler_pb2.ScaledObjectRef(name="scaled", namespace=operator.namespace, scaler_metadata=metadata)


async def metric(stub: Stub, of: scaler_pb2.ScaledObjectRef, name: str) -> float:
    reply = await stub.GetMetrics(scaler_pb2.GetMetricsRequest(scaled_object_ref=of, metric_name=name))
    [value] = reply.metric_values
    assert value.metric_name == name
    return value.metric_value_float


async def until_connected(server: TestedServer, *replicas: StandInReplica) -> None:
    async with asyncio.timeout(START_SECONDS):
        while {one.sampler_id for one in server.fleet.all_samplers if one.running()} != {
            replica.pod_uid for replica in replicas
        }:
            await asyncio.sleep(0.01)


async def refusal(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call
    return refused.value.code(), refused.value.details() or ""


async def test_any_server_answers_for_a_pool_with_what_its_replicas_report(
    cluster_settings: Settings, operator: StandInOperator
) -> None:
    targets = {"unfinishedSamples": "4", "oldestSampleSeconds": "0.5", "tokensPerSecond": "1500"}
    await operator.apply_pool("fast")
    replicas = [await operator.run_replica("fast") for _ in range(2)]
    for number, replica in enumerate(replicas, start=1):
        replica.fake.metrics = worker_pb2.WorkerMetrics(
            samples_active=number, samples_waiting=10, oldest_sample_seconds=30 / number, sampled_tokens_per_second=0.25
        )
        replica.fake.idle_seconds = 3600
    asked = reference(operator, **targets)
    async with serving(cluster_settings) as (one, first), serving(cluster_settings) as (other, second):
        for server, stub in ((one, first), (other, second)):
            await until_connected(server, *replicas)
            spec = await stub.GetMetricSpec(asked)
            assert {each.metric_name: each.target_size_float for each in spec.metric_specs} == {
                name: float(target) for name, target in targets.items()
            }
            assert [await metric(stub, asked, name) for name in targets] == [23, 30, 0.5]
            assert not (await stub.IsActive(asked)).result
        replicas[1].fake.idle_seconds = 0
        assert (await first.IsActive(asked)).result
        replicas[1].fake.hangs = True
        code, message = await refusal(metric(second, asked, "tokensPerSecond"))
        assert (code, "has not answered for 3 s" in message) == (grpc.StatusCode.UNAVAILABLE, True)


async def test_an_unknown_pool_and_invalid_metadata_are_refused_with_the_reason(
    cluster_settings: Settings, operator: StandInOperator
) -> None:
    async with serving(cluster_settings) as (_, stub):
        absent = reference(operator)
        for call in (stub.IsActive(absent), stub.GetMetricSpec(absent), metric(stub, absent, "unfinishedSamples")):
            code, message = await refusal(call)
            assert (code, message.partition(" does")[0]) == (
                grpc.StatusCode.NOT_FOUND,
                f"SamplerPool {operator.title('fast')}",
            )
        assert (await refusal(stub.StreamIsActive(absent).read()))[0] is grpc.StatusCode.NOT_FOUND
        wrong = reference(operator, unfinishedSamples="many")
        assert await refusal(stub.GetMetricSpec(wrong)) == (
            grpc.StatusCode.INVALID_ARGUMENT,
            "metadata 'unfinishedSamples' is 'many'; set it to a number above 0",
        )
        code, message = await refusal(metric(stub, reference(operator), "tokensPerSecond"))
        assert (code, "no target for the metric 'tokensPerSecond'" in message) == (
            grpc.StatusCode.INVALID_ARGUMENT,
            True,
        )


@pytest.mark.parametrize("suspended", [False, True], ids=["scaled to zero", "and suspended as idle"])
async def test_the_first_sample_of_a_pool_at_zero_tells_the_autoscaler_at_every_server_and_is_answered(
    cluster_settings: Settings, operator: StandInOperator, suspended: bool
) -> None:
    await operator.apply_pool("fast", replicas=0)
    if suspended:
        await operator.pool_falls_asleep("fast", "2026-01-02T03:04:05Z")
    asked = reference(operator)
    async with serving(cluster_settings) as (server, stub), serving(cluster_settings) as (_, elsewhere):
        sampler = await server.sampler()
        assert not (await elsewhere.IsActive(asked)).result
        news = elsewhere.StreamIsActive(asked)
        refused = await server.sample(sampler)
        assert (refused.status_code, "has no replicas" in refused.json()["detail"]) == (429, True)
        async with asyncio.timeout(START_SECONDS):
            assert (await news.read()).result
            # Each server sees the note as soon as its own watch reports it.
            while [(await one.IsActive(asked)).result for one in (stub, elsewhere)] != [True, True]:
                await asyncio.sleep(0.01)
        # KEDA's part: one replica. Then the client repeats its sample.
        await operator.kubectl("scale", "samplerpool", "fast", "--replicas=1")
        await operator.run_replica("fast")
        while (answer := await server.sample(sampler)).status_code == 429:
            await asyncio.sleep(0.01)
        assert answer.status_code == 200
        news.cancel()


async def test_a_session_answers_meanwhile_and_the_pool_at_zero_is_wanted_too(
    cluster_settings: Settings, operator: StandInOperator
) -> None:
    await operator.apply_pool("fast", replicas=0)
    await operator.apply("tiny")
    worker = await operator.run("tiny")
    async with serving(cluster_settings) as (server, stub):
        sampler = await server.sampler()
        while (answer := await server.sample(sampler)).status_code == 429:
            await asyncio.sleep(0.01)
        assert list(worker.fake.samples) == [answer.json()["request_id"]]
        async with asyncio.timeout(START_SECONDS):
            while not (await stub.IsActive(reference(operator))).result:
                await asyncio.sleep(0.01)


async def test_a_stopping_server_ends_its_streams_without_an_error(
    cluster_settings: Settings, operator: StandInOperator
) -> None:
    """KEDA opens a stream that ended again after 2 s, but a stream that failed after up to a minute."""
    await operator.apply_pool("fast", replicas=0)
    async with serving(cluster_settings) as (server, stub):
        news = stub.StreamIsActive(reference(operator))
        await stub.IsActive(reference(operator))  # the stream was accepted before this call
        server.services.pool_demand.close()
        async with asyncio.timeout(START_SECONDS):
            assert await news.read() is grpc.aio.EOF
            assert await news.code() is grpc.StatusCode.OK


async def test_the_port_with_tls_admits_only_clients_with_a_certificate_of_the_authority(
    cluster_settings: Settings, operator: StandInOperator, tmp_path: Path
) -> None:
    await operator.apply_pool("fast", replicas=0)
    authority, port = Authority(), free_port()
    directory = mount_secret(tmp_path / "scaler-tls", authority.leaf(NAME, usages=(SERVER,)), authority)
    changes = {"scaler_port": port, "scaler_tls_directory": directory}
    named = [("grpc.ssl_target_name_override", NAME)]
    async with serving(cluster_settings, **changes):
        for other in (authority, Authority()):
            leaf = other.leaf("keda.internal", usages=(CLIENT,))
            credentials = grpc.ssl_channel_credentials(authority.certificate, leaf.key, leaf.certificate)
            async with grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials, options=named) as channel:
                call = external_scaler_pb2_grpc.ExternalScalerStub(channel).IsActive(reference(operator))
                if other is authority:
                    assert not (await call).result
                else:
                    assert (await refusal(call))[0] is grpc.StatusCode.UNAVAILABLE


async def test_a_server_that_cannot_open_its_port_for_keda_does_not_start(
    cluster_settings: Settings, tmp_path: Path
) -> None:
    port = free_port()
    listener = await asyncio.start_server(lambda *_: None, "127.0.0.1", port)
    async with listener:
        with pytest.raises(StartupError, match="set scaler_port to another port"):
            async with serving(cluster_settings, scaler_port=port):
                pass
    with pytest.raises(StartupError, match=r"scaler_tls_directory: .*No such file"):
        async with serving(cluster_settings, scaler_tls_directory=tmp_path / "absent"):
            pass
