"""A worker that samples and trains: the fate of its samples when it stops."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import numpy as np
import pytest
from support.sampler.pool_replica import metadata_of
from support.sampler.scripted_sampler import ScriptedSampler
from support.worker.in_process import Worker
from support.worker.process import AWAIT_SECONDS
from support.worker.tls_port import Port, worker_port
from tinsmith_rpc import worker_pb2
from tinsmith_trainer.sampling.tenant_shares import SharedQuota


@pytest.fixture
def sampler() -> ScriptedSampler:
    return ScriptedSampler()


@pytest.fixture
async def port(sampler: ScriptedSampler, tmp_path: Path) -> AsyncIterator[Port]:
    worker = Worker(tmp_path, sampler=sampler)
    await worker.service.activate(1)
    async with worker_port(worker, tmp_path) as port:
        yield port
    await worker.service.drain()


def request(request_id: str) -> worker_pb2.SampleRequest:
    return worker_pb2.SampleRequest(request_id=request_id, prompt_tokens=np.array([1], "<i4").tobytes(), num_samples=1)


def awaited(request_id: str) -> worker_pb2.AwaitSampleRequest:
    return worker_pb2.AwaitSampleRequest(request_id=request_id, timeout_seconds=AWAIT_SECONDS)


async def test_a_stop_does_not_wait_for_samples_and_clients_submit_them_again(
    port: Port, sampler: ScriptedSampler
) -> None:
    """Training waits for its worker to be back; a sample can be drawn anew anywhere."""
    stub = port.api_server()
    await stub.Sample(request("done"), timeout=AWAIT_SECONDS)
    assert (await stub.AwaitSample(awaited("done"))).HasField("result")
    sampler.holds = True
    await stub.Sample(request("running"), timeout=AWAIT_SECONDS)
    asked = stub.AwaitSample(awaited("running"))
    await port.worker.service.drain()
    assert (await asked).WhichOneof("state") == "not_found"
    assert (await stub.AwaitSample(awaited("running"))).WhichOneof("state") == "not_found"


async def test_the_sampler_gets_the_tenant_of_a_sample_except_from_an_older_server(
    port: Port, sampler: ScriptedSampler
) -> None:
    stub = port.api_server()
    await stub.Sample(request("a"), timeout=AWAIT_SECONDS, metadata=metadata_of("Grüne Wiese"))
    await stub.Sample(request("b"), timeout=AWAIT_SECONDS)
    for request_id in "ab":
        assert (await stub.AwaitSample(awaited(request_id))).HasField("result")
    assert [job.tenant for job in sampler.jobs] == ["Grüne Wiese", ""]


async def test_a_tenant_that_has_too_many_samples_is_held_back_and_another_is_not(
    port: Port, sampler: ScriptedSampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = port.worker.service.samples
    assert samples is not None
    monkeypatch.setattr(samples, "_sample_quota", SharedQuota(8))
    sampler.holds = True
    stub = port.api_server()
    for number in range(4):
        await stub.Sample(request(f"many-{number}"), timeout=AWAIT_SECONDS, metadata=metadata_of("many"))
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await stub.Sample(request("more"), timeout=AWAIT_SECONDS, metadata=metadata_of("many"))
    assert refusal.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "as many of your samples as it takes" in (refusal.value.details() or "")
    await stub.Sample(request("one"), timeout=AWAIT_SECONDS, metadata=metadata_of("other"))


async def test_a_stopping_worker_refuses_new_samples(port: Port) -> None:
    await port.worker.service.drain()
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await port.api_server().Sample(request("late"), timeout=AWAIT_SECONDS)
    assert refusal.value.code() == grpc.StatusCode.UNAVAILABLE
