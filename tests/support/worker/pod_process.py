"""A process of the trainer as it is in a pod: mutual TLS, health in plain text, a termination log."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.certificates import CLIENT, SERVER, Authority, Leaf, mount_secret
from support.worker.process import AWAIT_SECONDS, RECONNECTS, START_SECONDS, TESTS
from support.worker.tls_port import WORKER_ID
from testcluster.ports import free_ports
from tinsmith_rpc import worker_pb2, worker_pb2_grpc
from tinsmith_trainer.worker.peers import API_SERVER


@dataclass
class PodProcess:
    """One life of a process on a folder, which outlives it. `flags` go before what it has by itself."""

    folder: Path
    flags: dict[str, str | None] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    authority: Authority = field(default_factory=Authority)
    worker_id: str = WORKER_ID

    def __post_init__(self) -> None:
        self.termination_log = self.folder / "termination-log"
        self.termination_log.unlink(missing_ok=True)
        self.address, self.health_address = (f"127.0.0.1:{port}" for port in free_ports(2))
        self.name = f"{self.worker_id}.worker.tinsmith.internal"
        self.secret = mount_secret(self.folder / "tls", self.own_leaf(), self.authority)
        self.process: subprocess.Popen[str] | None = None
        self._channels: list[grpc.aio.Channel] = []

    def own_leaf(self) -> Leaf:
        return self.authority.leaf(self.name, usages=(SERVER,))

    def own_flags(self) -> dict[str, str | None]:
        """Return the flags of every process in a pod. None is a flag without a value."""
        return {
            "--model-name": "some/model",
            "--checkpoint-root": f"file://{self.folder / 'checkpoints'}",
            "--listen": self.address,
            "--tls-directory": str(self.secret),
            "--health-address": self.health_address,
            "--worker-id": self.worker_id,
            "--termination-log": str(self.termination_log),
            "--log-level": "error",
        }

    def own_environment(self) -> dict[str, str]:
        return {
            "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent / "dev" / "testcluster")]),
            "HF_HUB_OFFLINE": "1",
        }

    # ---- the process

    def start(self) -> None:
        given = self.own_flags() | self.flags
        words = [word for flag, value in given.items() for word in ((flag,) if value is None else (flag, value))]
        command = [sys.executable, "-m", "tinsmith_trainer", *words]
        environment = {**os.environ, **self.own_environment(), **self.environment}
        self.process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)

    async def ended(self) -> tuple[int, str]:
        """Wait for the end, and return the exit status and standard error. The process may have started just now."""
        assert self.process is not None
        _, errors = await asyncio.to_thread(self.process.communicate, timeout=START_SECONDS)
        return self.process.returncode, errors

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    async def discard(self) -> None:
        for channel in self._channels:
            await channel.close()
        if self.process is not None:
            if self.process.poll() is None:
                self.process.kill()
            await self.ended()

    def termination(self) -> dict[str, str]:
        record: dict[str, str] = json.loads(self.termination_log.read_text())
        return record

    # ---- its doors

    def credentials(self) -> grpc.ChannelCredentials:
        """Return the API server's credentials."""
        leaf = self.authority.leaf(API_SERVER, usages=(CLIENT,))
        return grpc.ssl_channel_credentials(self.authority.certificate, leaf.key, leaf.certificate)

    @property
    def channel_options(self) -> list[tuple[str, str | int]]:
        return [("grpc.ssl_target_name_override", self.name), *RECONNECTS]

    def rpc(self) -> worker_pb2_grpc.WorkerAsyncStub:
        channel = grpc.aio.secure_channel(self.address, self.credentials(), self.channel_options)
        self._channels.append(channel)
        return worker_pb2_grpc.WorkerStub(channel)  # type: ignore[return-value]

    async def until_status(self, service: str, serving: bool, seconds: float = START_SECONDS) -> None:
        """Wait until the health service reports this status."""
        wanted = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        async with grpc.aio.insecure_channel(self.health_address, options=RECONNECTS) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            request = health_pb2.HealthCheckRequest(service=service)
            async for reply in stub.Watch(request, wait_for_ready=True, timeout=seconds):
                if reply.status == wanted:
                    return
        raise AssertionError(f"the health service ended before {service!r} was {wanted}")


async def describe(stub: worker_pb2_grpc.WorkerAsyncStub) -> worker_pb2.DescribeReply:
    return await stub.Describe(worker_pb2.DescribeRequest(), timeout=AWAIT_SECONDS)
