"""A worker process with the flags that it has in a pod, and gates at which its engine waits."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass

from support.engine.gated import FOLDER_VARIABLE, reached
from support.worker.pod_process import PodProcess, describe
from support.worker.process import AWAIT_SECONDS, MODEL, START_SECONDS, Call
from tinsmith_rpc import worker_pb2, worker_pb2_grpc
from typing_extensions import override

__all__ = ["IMAGE", "PodWorker", "describe", "finished"]

IMAGE = "tinsmith/trainer@sha256:one"


@dataclass
class PodWorker(PodProcess):
    """One life of a worker, on a folder with its volume."""

    epoch: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        self.gates = self.folder / "gates"
        self.gates.mkdir(exist_ok=True)

    @override
    def own_flags(self) -> dict[str, str | None]:
        return super().own_flags() | {
            "--model": "reference",
            "--engine": "support.engine.gated:build_gated",
            "--volume": str(self.folder / "volume"),
            "--image": IMAGE,
        }

    @override
    def own_environment(self) -> dict[str, str]:
        return super().own_environment() | {FOLDER_VARIABLE: str(self.gates)}

    # ---- gates

    def close_gate(self, gate: str) -> None:
        os.mkfifo(self.gates / gate)

    async def until_at(self, gate: str) -> None:
        """Wait until the engine arrives there, after calls of their usual length."""
        while not reached(self.gates / gate).exists():
            await asyncio.sleep(0.01)

    async def open_gate(self, gate: str) -> None:
        """Lets the engine through, once it stands before the gate."""
        await asyncio.to_thread((self.gates / gate).write_bytes, b"")

    # ---- its doors

    async def activated(self) -> worker_pb2_grpc.WorkerAsyncStub:
        stub = self.rpc()
        await stub.Activate(worker_pb2.ActivateRequest(epoch=self.epoch), wait_for_ready=True, timeout=START_SECONDS)
        return stub

    async def submit(self, stub: worker_pb2_grpc.WorkerAsyncStub, *calls: Call) -> None:
        for call in calls:
            request = worker_pb2.SubmitRequest(
                epoch=self.epoch, model_id=call.model_id, seq_id=call.seq_id, kind=call.kind, payload=call.payload
            )
            await stub.Submit(request, timeout=AWAIT_SECONDS)


async def finished(stub: worker_pb2_grpc.WorkerAsyncStub, seq_id: int) -> worker_pb2.AwaitReply:
    request = worker_pb2.AwaitRequest(model_id=MODEL, seq_id=seq_id, timeout_seconds=AWAIT_SECONDS)
    reply = await stub.Await(request)
    assert reply.HasField("result"), reply
    return reply
