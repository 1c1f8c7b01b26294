"""A worker's service on a TCP port of this machine, behind real mutual TLS, and clients of it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from support.certificates import CLIENT, SERVER, Authority, Leaf, mount_secret
from support.worker.in_process import Worker
from testcluster.ports import free_port
from tinsmith_rpc import worker_pb2_grpc
from tinsmith_trainer.worker.grpc_server import WorkerServicer, serve
from tinsmith_trainer.worker.metrics import WorkerName
from tinsmith_trainer.worker.peers import API_SERVER
from tinsmith_trainer.worker.tls import TlsDirectory

WORKER_ID = "uid-1"
WORKER_NAME = f"{WORKER_ID}.worker.tinsmith.internal"


@dataclass
class Port:
    """The address of the worker, and the folder with its certificate."""

    worker: Worker
    secret: Path
    authority: Authority
    address: str
    channels: list[grpc.aio.Channel] = field(default_factory=list)

    def client(
        self, leaf: Leaf | None, *, authority: Authority | None = None, expects: str = WORKER_NAME
    ) -> worker_pb2_grpc.WorkerAsyncStub:
        """`leaf` None shows no certificate."""
        credentials = grpc.ssl_channel_credentials(
            (authority or self.authority).certificate, leaf and leaf.key, leaf and leaf.certificate
        )
        options = [("grpc.ssl_target_name_override", expects), ("grpc.use_local_subchannel_pool", 1)]
        channel = grpc.aio.secure_channel(self.address, credentials, options)
        self.channels.append(channel)
        return worker_pb2_grpc.WorkerStub(channel)  # type: ignore[return-value]

    def api_server(self) -> worker_pb2_grpc.WorkerAsyncStub:
        return self.client(self.authority.leaf(API_SERVER, usages=(CLIENT,)))

    def swap(self, authority: Authority) -> None:
        """Renew the secret under another authority."""
        self.authority = authority
        mount_secret(self.secret, authority.leaf(WORKER_NAME, usages=(SERVER,)), authority)


@contextlib.asynccontextmanager
async def worker_port(worker: Worker, folder: Path) -> AsyncIterator[Port]:
    authority = Authority()
    secret = mount_secret(folder / "tls", authority.leaf(WORKER_NAME, usages=(SERVER,)), authority)
    address = f"127.0.0.1:{free_port()}"
    server = await serve(WorkerServicer(worker.service, WorkerName(WORKER_ID)), address, TlsDirectory(secret))
    port = Port(worker, secret, authority, address)
    try:
        yield port
    finally:
        for channel in port.channels:
            await channel.close()
        await server.stop(grace=0)
