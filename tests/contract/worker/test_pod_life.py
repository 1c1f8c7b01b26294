"""The process in a pod: answers to probes, stops, and Describe meanwhile."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from support.engine.gated import COMPUTING, LOADING
from support.worker.pod_worker import PodWorker, describe, finished
from support.worker.process import create, save, train
from support.worker.tls_port import WORKER_ID
from tinsmith_rpc import worker_pb2_grpc

StartPod = Callable[..., PodWorker]


@pytest.fixture
async def pod(tmp_path: Path) -> AsyncIterator[StartPod]:
    """Return a function that starts a worker on the test's folder, with these gates closed."""
    pods: list[PodWorker] = []

    def start(*gates: str, **options: object) -> PodWorker:
        pod = PodWorker(tmp_path, **options)  # type: ignore[arg-type]
        for gate in gates:
            pod.close_gate(gate)
        pod.start()
        pods.append(pod)
        return pod

    yield start
    for pod in pods:
        await pod.discard()


async def computing(worker: PodWorker, stub: worker_pb2_grpc.WorkerAsyncStub) -> float:
    """Wait until the engine is at a forward_backward, and return that call's age."""
    await worker.until_at(COMPUTING)
    return (await describe(stub)).running_seconds


async def test_it_is_alive_before_the_model_is_loaded_and_ready_after(pod: StartPod) -> None:
    worker = pod(LOADING)
    await worker.until_status("liveness", serving=True)
    for service in ("readiness", ""):
        await worker.until_status(service, serving=False)
    await worker.open_gate(LOADING)
    for service in ("readiness", "", "liveness"):
        await worker.until_status(service, serving=True)
    described = await describe(worker.rpc())
    assert (described.worker_id, described.model_name) == (WORKER_ID, "some/model")


async def test_a_stop_finishes_the_running_operation_and_takes_a_snapshot(pod: StartPod) -> None:
    worker = pod(COMPUTING)
    stub = await worker.activated()
    await worker.submit(stub, create(), train(1), train(2))
    await computing(worker, stub)
    worker.signal(signal.SIGTERM)
    await worker.until_status("readiness", serving=False)
    assert (await describe(stub)).draining
    await worker.until_status("liveness", serving=True)
    await worker.open_gate(COMPUTING)
    assert (await worker.ended())[0] == 0

    (worker.gates / COMPUTING).unlink()
    successor = pod(authority=worker.authority, epoch=2)
    stub = await successor.activated()
    for seq_id in (1, 2):
        await finished(stub, seq_id)
    [status] = (await describe(stub)).models
    assert status.last_applied_seq_id == 2


async def test_a_stop_in_the_middle_of_a_replay_leaves_the_rest_of_it_to_the_next_start(pod: StartPod) -> None:
    worker = pod()
    stub = await worker.activated()
    await worker.submit(stub, create(), *(train(seq_id) for seq_id in range(1, 6)))
    await finished(stub, 5)
    worker.signal(signal.SIGKILL)
    await worker.ended()

    replaying = pod(COMPUTING, authority=worker.authority, epoch=2)
    await computing(replaying, await replaying.activated())
    replaying.signal(signal.SIGTERM)
    await replaying.until_status("readiness", serving=False)
    await replaying.open_gate(COMPUTING)  # once: five operations would need five
    assert (await replaying.ended())[0] == 0

    (worker.gates / COMPUTING).unlink()
    successor = pod(authority=worker.authority, epoch=3)
    stub = await successor.activated()
    await successor.submit(stub, train(6))
    await finished(stub, 6)


async def test_describe_answers_while_the_engine_computes_and_says_for_how_long(pod: StartPod) -> None:
    worker = pod(COMPUTING)
    stub = await worker.activated()
    await worker.submit(stub, create(), train(1))
    first = await computing(worker, stub)
    assert first > 0
    assert (await describe(stub)).running_seconds > first
    await worker.open_gate(COMPUTING)
    await finished(stub, 1)
    while (await describe(stub)).running_seconds:
        pass


async def test_describe_tells_of_snapshots_and_slots(pod: StartPod) -> None:
    worker = pod(flags={"--adapter-slots": "3"})
    stub = await worker.activated()
    before = await describe(stub)
    assert (before.last_snapshot_time, before.snapshot_seconds, before.adapters_used) == (0.0, 0.0, 0)
    await worker.submit(stub, create(), train(1), save(2, "a"))
    await finished(stub, 2)
    after = await describe(stub)
    assert after.last_snapshot_time > 0
    assert after.snapshot_seconds > 0
    assert (after.adapters_used, after.capabilities.adapter_slots) == (1, 3)
    worker.signal(signal.SIGKILL)
    await worker.ended()

    successor = pod(authority=worker.authority, epoch=2)
    stub = await successor.activated()
    await successor.submit(stub, train(3))
    await finished(stub, 3)
    again = await describe(stub)
    assert again.last_snapshot_time == pytest.approx(after.last_snapshot_time, abs=10)
    assert again.snapshot_seconds > 0
