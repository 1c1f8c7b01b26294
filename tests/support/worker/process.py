"""A real worker process on the reference engine, and a client that behaves like the API server and the SDK."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from google.protobuf.message import Message
from support.engine.deadly import HARMLESS_TOKENS
from support.worker.messages import forward_backward, next_token_datum
from tinsmith_rpc import worker_pb2, worker_pb2_grpc

MODEL = "sess:train:0"
TESTS = Path(__file__).parents[2]
AWAIT_SECONDS = 30.0
START_SECONDS = 240.0
"""A process that takes longer to answer first hangs. On a busy machine, imports alone take long."""
RECONNECTS = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.use_local_subchannel_pool", 1),
)
"""The options of a channel.

By default pauses grow to many seconds while a process starts, and a new channel reuses another channel's connection to
the same address, which leads to the previous process.
"""
TOKENS_OF_MANY = 4
"""The length of each datum of `train_many`."""
Kind = worker_pb2.OperationKind.ValueType


@dataclass(frozen=True, slots=True)
class Call:
    """One operation of a program."""

    seq_id: int
    kind: Kind
    payload: bytes
    model_id: str = MODEL


def create(seed: int = 7, model_id: str = MODEL) -> Call:
    lora = worker_pb2.LoraConfig(rank=4, alpha=32.0, seed=seed, train_attn=True)
    return Call(0, worker_pb2.CREATE_MODEL, _bytes(worker_pb2.CreateModel(lora=lora)), model_id)


def train(seq_id: int, tokens: Sequence[int] = (3, 1, 4, 1, 5), *, forward_only: bool = False) -> Call:
    body = forward_backward([next_token_datum(tokens)], model_id=MODEL, seq_id=seq_id, forward_only=forward_only)
    return Call(seq_id, worker_pb2.FORWARD_BACKWARD, body)


def train_many(
    seq_id: int,
    datums: int,
    model_id: str = MODEL,
    *,
    forward_only: bool = False,
    last: Sequence[int] | None = None,
) -> Call:
    """Return this many datums, few of which are equal, and possibly one more. None begins with a deadly token."""
    tokens = [
        (number % HARMLESS_TOKENS, number // HARMLESS_TOKENS % HARMLESS_TOKENS, 4, 1, 5) for number in range(datums)
    ]
    bodies = [next_token_datum(each) for each in (*tokens, *([last] if last else ()))]
    body = forward_backward(bodies, model_id=model_id, seq_id=seq_id, forward_only=forward_only)
    return Call(seq_id, worker_pb2.FORWARD_BACKWARD, body, model_id)


def broken_train(seq_id: int) -> Call:
    return Call(seq_id, worker_pb2.FORWARD_BACKWARD, b"not a protobuf message")


def step(seq_id: int, learning_rate: float = 0.01) -> Call:
    request = worker_pb2.OptimStep(learning_rate=learning_rate, beta1=0.9, beta2=0.95, eps=1e-12)
    return Call(seq_id, worker_pb2.OPTIM_STEP, _bytes(request))


def save(seq_id: int, name: str, *, overwrite: bool = False) -> Call:
    request = worker_pb2.SaveWeights(kind=worker_pb2.TRAINING, name=name, overwrite=overwrite)
    return Call(seq_id, worker_pb2.SAVE_WEIGHTS, _bytes(request))


def save_ephemeral(seq_id: int) -> Call:
    request = worker_pb2.SaveWeights(kind=worker_pb2.EPHEMERAL, sampling_session_id="sess:sample:0")
    return Call(seq_id, worker_pb2.SAVE_WEIGHTS, _bytes(request))


def _bytes(message: Message) -> bytes:
    return message.SerializeToString()


@dataclass(slots=True)
class WorkerProcess:
    """One volume, over any number of lives of the process."""

    folder: Path
    flags: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    start_seconds: float = START_SECONDS
    epoch: int = 0
    process: subprocess.Popen[bytes] | None = None
    stub: worker_pb2_grpc.WorkerAsyncStub | None = None
    _channel: grpc.aio.Channel | None = None

    async def start(self, **environment: str) -> worker_pb2.DescribeReply:
        """Start a life, and activate it under the next epoch."""
        command = [
            *(sys.executable, "-m", "tinsmith_trainer", "--model", "reference", "--socket", str(self._socket)),
            *("--volume", str(self.folder / "volume"), "--checkpoint-root", f"file://{self.folder / 'checkpoints'}"),
            *("--engine", "support.engine.reference:build_reference", "--log-level", "error", *self.flags),
        ]
        inherited = {**os.environ, "PYTHONPATH": str(TESTS), **self.environment, **environment}
        self.process = subprocess.Popen(command, env=inherited)
        self._channel = grpc.aio.insecure_channel(f"unix:{self._socket}", options=RECONNECTS)
        self.stub = worker_pb2_grpc.WorkerStub(self._channel)  # type: ignore[assignment]
        described = await self.rpc.Describe(
            worker_pb2.DescribeRequest(), wait_for_ready=True, timeout=self.start_seconds
        )
        self.epoch += 1
        await self.rpc.Activate(worker_pb2.ActivateRequest(epoch=self.epoch))
        return described

    @property
    def _socket(self) -> Path:
        """Return a socket outside of the test's folder: its path has at most 107 bytes."""
        return Path(tempfile.gettempdir(), f"worker-{os.getpid()}-{id(self):x}.sock")

    @property
    def rpc(self) -> worker_pb2_grpc.WorkerAsyncStub:
        assert self.stub is not None
        return self.stub

    async def submit(self, call: Call, rejection: str | None = None) -> None:
        """Submit, and wait for the acknowledgement. Raises grpc.aio.AioRpcError."""
        request = worker_pb2.SubmitRequest(
            epoch=self.epoch, model_id=call.model_id, seq_id=call.seq_id, kind=call.kind, payload=call.payload
        )
        if rejection is not None:
            request.rejection.category, request.rejection.message = worker_pb2.USER, rejection
        await self.rpc.Submit(request)

    async def result(self, seq_id: int, model_id: str = MODEL, timeout: float = AWAIT_SECONDS) -> worker_pb2.AwaitReply:
        return await self.rpc.Await(worker_pb2.AwaitRequest(model_id=model_id, seq_id=seq_id, timeout_seconds=timeout))

    async def describe(self) -> worker_pb2.DescribeReply:
        return await self.rpc.Describe(worker_pb2.DescribeRequest())

    async def events(self, after: int = 0) -> list[worker_pb2.Event]:
        return list((await self.rpc.Events(worker_pb2.EventsRequest(after_event_id=after))).events)

    async def kill(self) -> None:
        await self._end(signal.SIGKILL)

    async def terminate(self) -> int:
        return await self._end(signal.SIGTERM)

    async def wait_dead(self) -> int:
        assert self.process is not None
        return await asyncio.to_thread(self.process.wait, START_SECONDS)

    async def _end(self, number: signal.Signals) -> int:
        if self.process is None:
            return 0
        if self.process.poll() is None:
            self.process.send_signal(number)
        code = await self.wait_dead()
        if self._channel is not None:
            await self._channel.close()
        # One that was killed leaves it.
        self._socket.unlink(missing_ok=True)
        self.process = None
        return code


async def run_program(worker: WorkerProcess, program: Sequence[Call], restarted_at: list[int]) -> dict[int, bytes]:
    """Run a pipelined program as SDK and server would, and restart the worker whenever it dies.

    Acknowledged operations are never submitted again. Returns every result, and notes in `restarted_at` before which
    operation a restart was needed.
    """
    for call in program:
        while True:
            try:
                await worker.submit(call)
            except grpc.aio.AioRpcError:
                restarted_at.append(call.seq_id)
                await _start_anew(worker)
            else:
                break
    results = {}
    for call in program:
        results[call.seq_id] = await _result_across_lives(worker, call, restarted_at)
    return results


async def _result_across_lives(worker: WorkerProcess, call: Call, restarted_at: list[int]) -> bytes:
    while True:
        try:
            reply = await worker.result(call.seq_id, call.model_id)
        except grpc.aio.AioRpcError:
            restarted_at.append(call.seq_id)
            await _start_anew(worker)
        else:
            return as_compared(reply)


def as_compared(reply: worker_pb2.AwaitReply) -> bytes:
    """Return the event for a comparison: only whether it has an ID, since IDs begin at the clock of their volume."""
    compared = worker_pb2.AwaitReply.FromString(reply.SerializeToString())
    if compared.HasField("result"):
        compared.result.event_id = min(compared.result.event_id, 1)
    return compared.SerializeToString(deterministic=True)


async def _start_anew(worker: WorkerProcess) -> None:
    await worker.wait_dead()
    await worker.kill()
    await worker.start()
