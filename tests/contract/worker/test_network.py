"""A worker on a port: mutual TLS alone, for the API server and the operator, with files that are replaced."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import ssl
import warnings
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from support.certificates import CLIENT, SERVER, Authority, Leaf, mount_secret
from support.worker.in_process import Worker
from support.worker.process import MODEL, Call, create, save_ephemeral, train
from support.worker.tls_port import WORKER_NAME, Port, worker_port
from tinsmith_rpc import worker_pb2, worker_pb2_grpc
from tinsmith_trainer.checkpoints import offered_saves
from tinsmith_trainer.checkpoints.offered_saves import OfferedSaves
from tinsmith_trainer.errors import ServerError
from tinsmith_trainer.worker.grpc_server import WorkerServicer, serve
from tinsmith_trainer.worker.metrics import WorkerName
from tinsmith_trainer.worker.peers import API_SERVER, OPERATOR, SAMPLER
from tinsmith_trainer.worker.tls import TlsDirectory

from .conftest import StartWorker

CALL_SECONDS = 20.0


@pytest.fixture
async def port(worker: Worker, tmp_path: Path) -> AsyncIterator[Port]:
    async with worker_port(worker, tmp_path) as port:
        yield port


async def describe(stub: worker_pb2_grpc.WorkerAsyncStub) -> worker_pb2.DescribeReply:
    return await stub.Describe(worker_pb2.DescribeRequest(), timeout=CALL_SECONDS)


async def refused_as(stub: worker_pb2_grpc.WorkerAsyncStub) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await describe(stub)
    return refusal.value


async def handshake(port: Port, folder: Path, version: ssl.TLSVersion) -> str:
    """Return the TLS version of a connection whose client supports no later one."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_ciphers("ALL:@SECLEVEL=0")  # By default the client does not offer old versions.
    context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    context.set_alpn_protocols(["h2"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        context.minimum_version = ssl.TLSVersion.TLSv1
        context.maximum_version = version
    host, _, number = port.address.partition(":")
    _, writer = await asyncio.open_connection(host, int(number), ssl=context)
    try:
        agreed: str = writer.get_extra_info("ssl_object").version()
        return agreed
    finally:
        writer.transport.abort()


def request(call: Call) -> worker_pb2.SubmitRequest:
    return worker_pb2.SubmitRequest(
        epoch=1, model_id=call.model_id, seq_id=call.seq_id, kind=call.kind, payload=call.payload
    )


async def test_the_api_server_may_make_every_call(port: Port) -> None:
    stub = port.api_server()
    assert (await describe(stub)).instance_id == port.worker.service.instance_id
    await stub.Submit(request(create()), timeout=CALL_SECONDS)
    awaited = worker_pb2.AwaitRequest(model_id=MODEL, seq_id=0, timeout_seconds=CALL_SECONDS)
    assert (await stub.Await(awaited)).HasField("result")


async def test_the_operator_may_only_ask_how_it_is_doing(port: Port) -> None:
    stub = port.client(port.authority.leaf(OPERATOR, usages=(CLIENT,)))
    assert (await describe(stub)).instance_id == port.worker.service.instance_id
    for call, message in (
        (stub.Submit, request(create())),
        (stub.Activate, worker_pb2.ActivateRequest(epoch=9)),
        (stub.Events, worker_pb2.EventsRequest()),
        (stub.Sample, worker_pb2.SampleRequest()),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await call(message, timeout=CALL_SECONDS)  # type: ignore[operator]
        assert refusal.value.code() == grpc.StatusCode.PERMISSION_DENIED
        assert "may only ask how this worker is doing" in (refusal.value.details() or "")
    assert port.worker.service.epoch == 1


async def test_a_sampler_may_only_ask_for_saves_and_no_other_peer_for_any_but_the_api_server(port: Port) -> None:
    """Its certificate names its pool, too."""
    names = ("pool-uid.worker.tinsmith.internal", SAMPLER)
    sampler = port.client(port.authority.leaf(*names, usages=(SERVER, CLIENT)))
    assert await save_refused_as(sampler) == grpc.StatusCode.NOT_FOUND
    assert await save_refused_as(port.api_server()) == grpc.StatusCode.NOT_FOUND
    assert (await refused_as(sampler)).code() == grpc.StatusCode.PERMISSION_DENIED
    for name in (OPERATOR, "another.peer", "uid-2.worker.tinsmith.internal"):
        other = port.client(port.authority.leaf(name, usages=(CLIENT,)))
        assert await save_refused_as(other) == grpc.StatusCode.PERMISSION_DENIED
    unnamed = port.client(port.authority.leaf(SAMPLER, usages=(SERVER,)))
    assert await save_refused_as(unnamed) == grpc.StatusCode.UNAVAILABLE


async def save_refused_as(stub: worker_pb2_grpc.WorkerAsyncStub) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await anext(aiter(stub.StreamSave(worker_pb2.StreamSaveRequest(manifest_digest="0"), timeout=CALL_SECONDS)))
    return refusal.value.code()


async def test_a_sampler_that_gives_up_in_the_middle_makes_room_for_others(
    start: StartWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offered_saves, "PART_BYTES", 1)
    monkeypatch.setattr(offered_saves, "STREAM_WAIT_SECONDS", CALL_SECONDS)
    worker = await start(offered_saves_bytes=10**9)
    await worker.submit(create(), save_ephemeral(1))
    await worker.finished(1)
    digest = (await worker.events())[-1].checkpoint_saved.manifest_digest
    async with worker_port(worker, tmp_path) as port:
        stub = port.client(port.authority.leaf(SAMPLER, usages=(CLIENT,)))
        for _ in range(2 * offered_saves.MAX_STREAMS):
            given = stub.StreamSave(worker_pb2.StreamSaveRequest(manifest_digest=digest), timeout=CALL_SECONDS)
            assert (await anext(aiter(given))).manifest
            given.cancel()
            await until_free(worker.service.parts.offered_saves, digest)


async def until_free(saves: OfferedSaves, digest: str) -> None:
    """Wait until as many samplers as before can get saves."""
    async with contextlib.AsyncExitStack() as taken:
        for _ in range(offered_saves.MAX_STREAMS):
            await taken.enter_async_context(saves.streaming(digest))


async def test_the_operator_does_not_count_as_a_way_for_clients(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[str] = []
    monkeypatch.setattr(port.worker.service, "note_contact", lambda: heard.append("heard"))
    await describe(port.client(port.authority.leaf(OPERATOR, usages=(CLIENT,))))
    assert heard == []
    await describe(port.api_server())
    assert heard == ["heard"]


async def test_another_name_of_our_authority_is_refused_with_a_message(port: Port) -> None:
    refusal = await refused_as(port.client(port.authority.leaf("another.peer", usages=(CLIENT,))))
    assert refusal.code() == grpc.StatusCode.PERMISSION_DENIED
    assert "another.peer" in (refusal.details() or "")


async def test_a_certificate_of_another_authority_does_not_get_in(port: Port) -> None:
    leaf = Authority().leaf(API_SERVER, usages=(CLIENT,))
    assert (await refused_as(port.client(leaf))).code() == grpc.StatusCode.UNAVAILABLE


async def test_a_certificate_that_ran_out_does_not_get_in(port: Port) -> None:
    leaf = port.authority.leaf(API_SERVER, usages=(CLIENT,), lifetime=-datetime.timedelta(days=1))
    assert (await refused_as(port.client(leaf))).code() == grpc.StatusCode.UNAVAILABLE


async def test_a_client_that_expects_another_worker_turns_away(port: Port) -> None:
    leaf = port.authority.leaf(API_SERVER, usages=(CLIENT,))
    refusal = await refused_as(port.client(leaf, expects="uid-2.worker.tinsmith.internal"))
    assert "Hostname" in (refusal.details() or "")


async def test_new_certificates_apply_to_new_connections_and_running_calls_continue(port: Port) -> None:
    before = port.api_server()
    await before.Submit(request(create()), timeout=CALL_SECONDS)
    await before.Submit(request(train(2)), timeout=CALL_SECONDS)
    awaited = worker_pb2.AwaitRequest(model_id=MODEL, seq_id=2, timeout_seconds=CALL_SECONDS)
    waiting = asyncio.ensure_future(before.Await(awaited))
    old_leaf, old_authority = port.authority.leaf(API_SERVER, usages=(CLIENT,)), port.authority

    port.swap(Authority())

    after = port.api_server()
    assert (await describe(after)).instance_id == port.worker.service.instance_id
    assert (await refused_as(port.client(old_leaf, authority=old_authority))).code() == grpc.StatusCode.UNAVAILABLE
    await after.Submit(request(train(1)), timeout=CALL_SECONDS)
    assert (await waiting).HasField("result")


async def test_files_that_cannot_be_used_leave_the_old_ones_in_place(port: Port) -> None:
    other = Authority().leaf(WORKER_NAME, usages=(SERVER,))
    mount_secret(port.secret, Leaf(other.certificate, b"no key"), port.authority)
    assert (await describe(port.api_server())).instance_id == port.worker.service.instance_id


async def test_a_port_in_use_is_reported(port: Port) -> None:
    with pytest.raises(ServerError, match="Choose a free address"):
        await serve(WorkerServicer(port.worker.service, WorkerName()), port.address, TlsDirectory(port.secret))


async def test_a_client_without_a_certificate_does_not_get_in(port: Port) -> None:
    assert (await refused_as(port.client(None))).code() == grpc.StatusCode.UNAVAILABLE


async def test_a_server_certificate_is_no_ticket_for_a_client(port: Port) -> None:
    leaf = port.authority.leaf(API_SERVER, usages=(SERVER,))
    assert (await refused_as(port.client(leaf))).code() == grpc.StatusCode.UNAVAILABLE


async def test_plain_text_gets_no_answer(port: Port) -> None:
    async with grpc.aio.insecure_channel(port.address) as channel:
        refusal = await refused_as(worker_pb2_grpc.WorkerStub(channel))  # type: ignore[arg-type]
    assert refusal.code() == grpc.StatusCode.UNAVAILABLE


async def test_old_tls_gets_no_answer(port: Port, tmp_path: Path) -> None:
    folder = mount_secret(tmp_path / "client", port.authority.leaf(API_SERVER, usages=(CLIENT,)), port.authority)
    assert await handshake(port, folder, ssl.TLSVersion.TLSv1_2) == "TLSv1.2"
    with pytest.raises((ssl.SSLError, ConnectionError)):
        await handshake(port, folder, ssl.TLSVersion.TLSv1_1)
