"""Real sampler processes as replicas of a pool: a rolling update, as the client of an API server sees it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support.sampler.pool_replica import PoolReplica
from support.server.http_server import API_KEY, TestedServer, running_server
from support.server.operator_stand_in import MODEL, StandInOperator, StandInReplica, StandInWorker, reached_at
from support.tiny_models import tiny_directory
from tinsmith_rpc import wire_pb2
from tinsmith_server.fleet.kubernetes.fleet import KubernetesFleet
from tinsmith_server.settings import Settings

SAMPLES = 24
# Loading torch, on a machine that is busy with other tests.
LOAD_SECONDS = 240.0


@pytest.fixture
async def process(operator: StandInOperator, tmp_path: Path) -> AsyncIterator[PoolReplica]:
    """Return the first replica of the pool `fast`; the second one is a fake."""
    uid = await operator.apply_pool("fast", replicas=2)
    process = PoolReplica(tmp_path, authority=operator.authority, worker_id=uid, model=tiny_directory())
    process.start()
    port = int(process.address.rpartition(":")[2])
    await operator.publish(StandInReplica("fast", 7, StandInWorker(uid, operator.authority, port)))
    await operator.run_replica("fast")
    yield process
    await process.discard()


@pytest.fixture
async def server(
    cluster_settings: Settings, process: PoolReplica, operator: StandInOperator
) -> AsyncIterator[TestedServer]:
    settings = Settings(**{**cluster_settings.model_dump(), "api_key": API_KEY, "poll_hold_seconds": 5.0})
    async with running_server(settings, KubernetesFleet(settings, reached_at)) as server:
        async with asyncio.timeout(LOAD_SECONDS):
            while len(server.fleet.samplers(MODEL)) < 2:
                await asyncio.sleep(0.05)
        yield server


async def submitted(server: TestedServer, sampler: str, seq_id: int) -> str:
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [seq_id + 1, 2, 3]}]}
    answer = await server.sample(sampler, seq_id, prompt=prompt, sampling_params={"max_tokens": 8, "stop": []})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["request_id"])


async def tokens_of(server: TestedServer, request_id: str) -> int:
    """Return the tokens of a sample's only sequence, once it is complete; a fake sampler's has one."""
    while (answer := await server.result(request_id)).status_code == 408:
        pass
    assert answer.status_code == 200, answer.text
    [sequence] = wire_pb2.SampleResponse.FromString(answer.content).sequences
    return len(sequence.tokens) // 4


@pytest.mark.timeout(LOAD_SECONDS + 60)
async def test_a_draining_replica_delivers_every_result_and_the_other_replica_takes_new_samples(
    server: TestedServer, process: PoolReplica, operator: StandInOperator
) -> None:
    [staying] = operator.replicas
    sampler = await server.sampler()
    before = [await submitted(server, sampler, seq_id) for seq_id in range(SAMPLES)]
    expected = [1 if request_id in staying.fake.samples else 8 for request_id in before]
    assert set(expected) == {1, 8}
    process.signal(signal.SIGTERM)
    after = [await submitted(server, sampler, SAMPLES + number) for number in range(SAMPLES)]
    expected += [1 if request_id in staying.fake.samples else 8 for request_id in after]
    lengths = await asyncio.gather(*(tokens_of(server, request_id) for request_id in [*before, *after]))
    assert lengths == expected
    status, errors = await process.ended()
    assert (status, errors) == (0, "")
    last = await submitted(server, sampler, 2 * SAMPLES)
    assert last in staying.fake.samples
