"""A worker that samples beside its training: what becomes of the samples when it stops."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import numpy as np
import pytest
from support.sampler.scripted_sampler import ScriptedSampler
from support.worker.in_process import Worker
from support.worker.process import AWAIT_SECONDS
from support.worker.tls_port import Port, worker_port
from tinsmith_rpc import worker_pb2


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


async def test_a_stop_does_not_wait_for_samples_and_who_asks_for_them_submits_again(
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


async def test_one_that_stops_takes_no_more_samples(port: Port) -> None:
    await port.worker.service.drain()
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await port.api_server().Sample(request("late"), timeout=AWAIT_SECONDS)
    assert refusal.value.code() == grpc.StatusCode.UNAVAILABLE
