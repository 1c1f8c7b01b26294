"""Large results that many clients poll, or that none reads: they take no more memory than they may."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.server.fake_fleet import FakeFleet
from support.server.fake_worker import proto_result
from support.server.http_server import API_KEY, TestedServer, client_of, running_server, settings_for
from tinsmith_rpc import wire_pb2
from tinsmith_server.services.polling.results import TIMES_IN_JSON

MIB = 2**20
FLOATS = 256 * 2**10
OF_A_TENANT = 16 * MIB


@dataclass
class Reader:
    """A client that sends its poll, and reads nothing of the answer until it may."""

    begun: asyncio.Semaphore
    """Released when its answer begins."""
    may_read: asyncio.Event = field(default_factory=asyncio.Event)
    status: int = 0
    content: bytearray = field(default_factory=bytearray)

    async def poll(self, server: TestedServer, request_id: str, accept: bytes) -> None:
        body = b'{"request_id": "%s"}' % request_id.encode()
        headers = [(b"host", b"server"), (b"x-api-key", API_KEY.encode()), (b"accept", accept)]
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": "/api/v1/retrieve_future",
            "raw_path": b"/api/v1/retrieve_future",
            "query_string": b"",
            "root_path": "",
            "headers": headers,
        }

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": body}

        async def send(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                self.status = message["status"]
                self.begun.release()
                return
            await self.may_read.wait()
            self.content += message["body"]

        await server.app(scope, receive, send)


@pytest.fixture
async def small(tmp_path: Path) -> AsyncIterator[TestedServer]:
    """Return a server on which a tenant may have little in flight."""
    fleet = FakeFleet()
    try:
        async with running_server(settings_for(tmp_path, body_bytes_per_tenant=OF_A_TENANT), fleet) as server:
            yield server
    finally:
        fleet.cleanup()


async def large_result(server: TestedServer) -> str:
    """Return a result of a mebibyte in protobuf."""
    model_id = await server.model()
    request_id = (await server.forward_backward(model_id, 1)).json()["request_id"]
    record = wire_pb2.ArrayRecord(num_datums=1)
    logprobs = record.fields["logprobs"]
    logprobs.dtype, logprobs.data = wire_pb2.FLOAT32, b"\x9a\x99\x19\xbf" * FLOATS
    logprobs.offsets = b"".join(offset.to_bytes(8, "little") for offset in (0, 4 * FLOATS))
    output = wire_pb2.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", loss_fn_outputs=[record])
    server.worker.outcomes[model_id, 1] = proto_result(output.SerializeToString())
    return str(request_id)


@asynccontextmanager
async def readers(
    server: TestedServer, request_id: str, run_in_transaction: int, accept: bytes
) -> AsyncIterator[list[Reader]]:
    """Three times as many as there is room for. Returns when so many are answered."""
    begun = asyncio.Semaphore(0)
    all_readers = [Reader(begun) for _ in range(3 * run_in_transaction)]
    polls = [asyncio.create_task(reader.poll(server, request_id, accept)) for reader in all_readers]
    for _ in range(run_in_transaction):
        await begun.acquire()
    try:
        yield all_readers
        for reader in all_readers:
            reader.may_read.set()
        await asyncio.gather(*polls)
    finally:
        for poll in polls:
            poll.cancel()
        await asyncio.gather(*polls, return_exceptions=True)


@pytest.mark.parametrize(("accept", "run_in_transaction"), [(b"application/x-protobuf", 15), (b"application/json", 2)])
async def test_unread_results_stay_within_the_budget_and_every_reader_gets_an_answer(
    small: TestedServer, accept: bytes, run_in_transaction: int
) -> None:
    """In JSON a result counts as what it and its text take, until the text is there."""
    request_id = await large_result(small)
    async with readers(small, request_id, run_in_transaction, accept) as all_readers:
        assert sum(reader.status == 200 for reader in all_readers) < 2 * run_in_transaction
        assert small.services.admission.results.held_bytes <= OF_A_TENANT
    assert {reader.status for reader in all_readers} == {200}
    assert len({bytes(reader.content) for reader in all_readers}) == 1
    assert small.services.admission.results.held_bytes == 0


async def test_many_polls_that_wait_for_one_result_hold_it_once(small: TestedServer) -> None:
    """However many they are, the worker is asked once."""
    model_id = await small.model()
    small.worker.withheld.add((model_id, 1))
    request_id = (await small.forward_backward(model_id, 1)).json()["request_id"]
    before = small.worker.awaits
    polls = [asyncio.create_task(small.result(request_id)) for _ in range(50)]
    await small.worker.awaited()
    await small.worker.finish((model_id, 1))
    assert {answer.status_code for answer in await asyncio.gather(*polls)} == {200}
    assert small.worker.awaits - before < 5


async def test_another_tenant_has_its_results_meanwhile(small: TestedServer) -> None:
    other = (await small.services.keys.create("other", "of a test")).secret
    request_id = await large_result(small)
    async with (
        readers(small, request_id, 15, b"application/x-protobuf"),
        client_of(httpx.ASGITransport(small.app), other) as client,
    ):
        other_tenant = TestedServer(small.app, client, small.fleet, small.time)
        answer = await other_tenant.result(await large_result(other_tenant))
        assert answer.status_code == 200
        assert len(answer.content) > MIB


async def test_a_result_over_the_budget_goes_by_itself(tmp_path: Path) -> None:
    fleet = FakeFleet()
    try:
        async with running_server(settings_for(tmp_path, body_bytes_per_tenant=MIB), fleet) as server:
            request_id = await large_result(server)
            answers = await asyncio.gather(*(server.result(request_id) for _ in range(4)))
            assert {len(answer.content) for answer in answers} == {len(answers[0].content)}
            assert len(answers[0].content) * TIMES_IN_JSON > MIB
    finally:
        fleet.cleanup()
