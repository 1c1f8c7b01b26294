"""The promises about samples of a local worker, of a worker that trains, and of a pool."""

from __future__ import annotations

import asyncio

import httpx
from support.server.fleet_under_test import START_SECONDS, SamplingInstallation
from support.server.http_server import TestedServer
from tinsmith_rpc import wire_pb2


async def sampled(server: TestedServer, sampler: str, seq_id: int = 0, **fields: object) -> str:
    """Submit a sample, and return its ID."""
    async with asyncio.timeout(START_SECONDS):
        while (answer := await server.sample(sampler, seq_id, **fields)).status_code == 429:
            await asyncio.sleep(0.05)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["request_id"])


async def settled(server: TestedServer, request_id: str) -> httpx.Response:
    """Once there is more to say than "not yet"."""
    async with asyncio.timeout(START_SECONDS):
        while (answer := await server.result(request_id)).status_code == 408:
            await asyncio.sleep(0.05)
    return answer


async def test_a_sample_comes_back_by_its_id_any_number_of_times(sampling: SamplingInstallation) -> None:
    async with sampling.serving() as server:
        request_id = await sampled(server, await server.sampler(), num_samples=2)
        for _ in range(2):
            answer = await settled(server, request_id)
            assert answer.headers["content-type"] == "application/x-protobuf"
            assert len(wire_pb2.SampleResponse.FromString(answer.content).sequences) == 2


async def test_a_sample_that_cannot_work_fails_and_is_not_pushed_back(sampling: SamplingInstallation) -> None:
    async with sampling.serving() as server:
        request_id = await sampled(server, await server.sampler(), sampling_params={"temperature": -1})
        failed = (await settled(server, request_id)).json()
        assert (failed["category"], "sampling_params.temperature" in failed["error"]) == ("user", True)


async def test_a_sample_of_a_dead_process_is_gone_and_the_next_one_is_accepted(
    sampling: SamplingInstallation,
) -> None:
    async with sampling.serving() as server:
        sampler = await server.sampler()
        request_id = await sampled(server, sampler)
        assert (await settled(server, request_id)).status_code == 200
        await sampling.crash()
        # Until the crash is noticed, the connection may still be the old one, and a poll gets a 408.
        assert (await settled(server, request_id)).status_code == 410
        again = await sampled(server, sampler, 1)
        assert (await settled(server, again)).status_code == 200


async def test_a_sample_that_one_server_has_given_is_retrieved_and_cancelled_at_another(
    shared_sampling: SamplingInstallation,
) -> None:
    async with shared_sampling.serving() as one, shared_sampling.serving() as other:
        sampler = await one.sampler()
        request_id = await sampled(one, sampler)
        assert (await settled(other, request_id)).status_code == 200
        assert await sampled(other, sampler) == request_id
        assert (await other.post("/cancel_future", {"request_id": request_id})).status_code == 200


async def test_a_server_that_starts_finds_the_samples_of_the_one_before(shared_sampling: SamplingInstallation) -> None:
    async with shared_sampling.serving() as server:
        request_id = await sampled(server, await server.sampler())
    async with shared_sampling.serving() as successor:
        assert (await settled(successor, request_id)).status_code == 200
