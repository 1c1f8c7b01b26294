"""The server's end of a worker's port: it knows the worker by its name, and takes renewed certificates."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support.certificates import CLIENT, Authority, mount_secret
from support.worker.in_process import Worker
from support.worker.process import MODEL, create
from support.worker.tls_port import WORKER_ID, Port, worker_port
from tinsmith_rpc import worker_pb2
from tinsmith_server.errors import WorkerError, WorkerUnavailable
from tinsmith_server.fleet import channels
from tinsmith_server.fleet.channels import TlsDirectory, WorkerTls
from tinsmith_server.fleet.client import GrpcWorkerClient
from tinsmith_trainer.worker.peers import API_SERVER, OPERATOR


@pytest.fixture
async def port(tmp_path: Path) -> AsyncIterator[Port]:
    worker = Worker(tmp_path)
    async with worker_port(worker, tmp_path) as port:
        yield port
    await worker.service.drain()


def secret(folder: Path, authority: Authority, name: str = API_SERVER) -> Path:
    return mount_secret(folder / "server-tls", authority.leaf(name, usages=(CLIENT,)), authority)


async def described(port: Port, tls: WorkerTls) -> worker_pb2.DescribeReply:
    client = GrpcWorkerClient(port.address, tls)
    try:
        return await client.describe()
    finally:
        await client.close()


async def test_a_worker_is_activated_and_worked_with_over_the_network(port: Port, tmp_path: Path) -> None:
    tls = TlsDirectory(secret(tmp_path, port.authority)).for_worker(WORKER_ID)
    client = GrpcWorkerClient(port.address, tls)
    await client.activate(1)
    call = create()
    creation = worker_pb2.SubmitRequest(model_id=MODEL, kind=call.kind, payload=call.payload)
    assert (await client.submit(creation, "ada")).epoch == 1
    assert (await client.await_result(MODEL, 0, 20.0)).HasField("result")
    assert (await client.describe()).worker_id == WORKER_ID
    await client.close()


class Proxy:
    """A connection to a port that a test can silence, as a frozen host does: it stays open and passes nothing on."""

    def __init__(self, address: str) -> None:
        self._target = address.rsplit(":", 1)
        self.passes = asyncio.Event()
        self.passes.set()

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, port = self._target
        inner_reader, inner_writer = await asyncio.open_connection(host, int(port))
        await asyncio.gather(self._pass(reader, inner_writer), self._pass(inner_reader, writer))

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while content := await reader.read(65536):
            await self.passes.wait()
            writer.write(content)
        writer.close()


async def test_a_connection_that_falls_silent_is_noticed_by_pings(
    port: Port, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pings = {"grpc.keepalive_time_ms": 1000, "grpc.keepalive_timeout_ms": 200, "grpc.http2.ping_timeout_ms": 200}
    monkeypatch.setattr(channels, "NETWORK_OPTIONS", [*({**dict(channels.NETWORK_OPTIONS), **pings}).items()])
    proxy = Proxy(port.address)
    server = await asyncio.start_server(proxy, "127.0.0.1", 0)
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    client = GrpcWorkerClient(address, TlsDirectory(secret(tmp_path, port.authority)).for_worker(WORKER_ID))
    await client.activate(1)
    waiting = asyncio.create_task(client.events(0, 600.0))
    proxy.passes.clear()
    await asyncio.wait_for(client.until_broken(), 60)
    with pytest.raises(WorkerUnavailable):
        await waiting
    proxy.passes.set()
    await client.close()
    server.close()


async def test_another_worker_at_the_address_is_not_spoken_to(port: Port, tmp_path: Path) -> None:
    tls = TlsDirectory(secret(tmp_path, port.authority)).for_worker("uid-2")
    with pytest.raises(WorkerUnavailable):
        await described(port, tls)


async def test_a_refusal_by_name_reaches_the_log_of_the_server(port: Port, tmp_path: Path) -> None:
    tls = TlsDirectory(secret(tmp_path, port.authority, OPERATOR)).for_worker(WORKER_ID)
    client = GrpcWorkerClient(port.address, tls)
    with pytest.raises(WorkerError, match="may only ask how this worker is doing"):
        await client.activate(1)
    await client.close()


async def test_a_channel_opened_after_a_renewal_shows_the_new_certificate(port: Port, tmp_path: Path) -> None:
    directory = TlsDirectory(secret(tmp_path, port.authority))
    before = directory.for_worker(WORKER_ID)
    assert directory.shows(before)

    port.swap(Authority())
    secret(tmp_path, port.authority)

    assert not directory.shows(before)
    with pytest.raises(WorkerUnavailable):
        await described(port, before)
    after = directory.for_worker(WORKER_ID)
    assert (await described(port, after)).worker_id == WORKER_ID
    assert directory.shows(after)


async def test_files_that_vanish_replace_nothing(port: Port, tmp_path: Path) -> None:
    folder = secret(tmp_path, port.authority)
    directory = TlsDirectory(folder)
    tls = directory.for_worker(WORKER_ID)
    (folder / "..data").unlink()
    assert directory.shows(tls)


async def test_a_worker_that_does_not_sample_says_so_and_another_one_can_be_asked(port: Port, tmp_path: Path) -> None:
    tls = TlsDirectory(secret(tmp_path, port.authority)).for_worker(WORKER_ID)
    client = GrpcWorkerClient(port.address, tls)
    with pytest.raises(WorkerUnavailable, match=r"only trains.*sampling: Colocated"):
        await client.sample(worker_pb2.SampleRequest(request_id="sess:sample:0:0"), "ada")
    assert (await client.await_sample("sess:sample:0:0", 0)).HasField("not_found")
    await client.cancel_sample("sess:sample:0:0")
    await client.close()


async def test_a_key_does_not_show_in_a_log(port: Port, tmp_path: Path) -> None:
    tls = TlsDirectory(secret(tmp_path, port.authority)).for_worker(WORKER_ID)
    assert tls.key.splitlines()[1].decode() not in repr(tls)


async def test_a_call_under_way_ends_over_a_connection_that_is_given_up(port: Port, tmp_path: Path) -> None:
    """Each renewal of the certificate gives a connection up."""
    tls = TlsDirectory(secret(tmp_path, port.authority)).for_worker(WORKER_ID)
    client = GrpcWorkerClient(port.address, tls)
    await client.activate(1)
    held = asyncio.create_task(client.events(0, 0.5))
    await asyncio.sleep(0)
    await asyncio.gather(client.close(20.0), held)
    assert held.result() == []
    with pytest.raises(WorkerUnavailable):
        await client.describe()


async def test_files_are_parsed_once_and_again_when_they_have_changed(
    port: Port, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thousand connections ask every 10 s whether they are still the same."""
    parsed: list[None] = []
    make_context = ssl.SSLContext

    def counted(protocol: int) -> ssl.SSLContext:
        parsed.append(None)
        return make_context(protocol)

    monkeypatch.setattr("tinsmith_server.fleet.channels.ssl.SSLContext", counted)
    folder = secret(tmp_path, port.authority)
    directory = TlsDirectory(folder)
    shown = directory.for_worker(WORKER_ID)
    assert all(directory.shows(shown) for _ in range(100))
    assert len(parsed) == 1
    secret(tmp_path, port.authority)
    assert not directory.shows(shown)
    assert len(parsed) == 2
