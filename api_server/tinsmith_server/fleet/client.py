"""A client of a worker's gRPC service. The client has typed calls, and raises the server's own errors."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import grpc
from google.protobuf.message import Message
from tinsmith_rpc import SHARE_WEIGHT_METADATA, TENANT_METADATA, tracing, worker_pb2, worker_pb2_grpc
from typing_extensions import override

from tinsmith_server.errors import (
    ModelNotAtWorker,
    StaleEpoch,
    StorageFull,
    TinsmithError,
    TooManySamples,
    Unprocessable,
    WorkerError,
    WorkerFull,
    WorkerUnavailable,
)
from tinsmith_server.fleet.base import WorkerClient
from tinsmith_server.fleet.channels import WorkerTls, open_channel

Request = TypeVar("Request", bound=Message)
Reply = TypeVar("Reply", bound=Message)

CLOSED = "the connection to the worker was closed"

# A worker may delay an acknowledgement by 20 s when its backlog is full. The SDK waits for 60 s, and the operation of a
# worker that does not answer must reach the store before.
SUBMIT_TIMEOUT_SECONDS = 30.0
QUICK_TIMEOUT_SECONDS = 20.0
# The time for a conversation of megabytes, queued after other renderings.
RENDER_TIMEOUT_SECONDS = 60.0
# The time for files of 64 MiB at most, from a volume that may be on the network.
READ_TIMEOUT_SECONDS = 60.0
# The time for reading, checking and writing gigabytes of files, queued after other imports.
IMPORT_TIMEOUT_SECONDS = 600.0
# The time that a reply may take beyond the requested hold.
HOLD_GRACE_SECONDS = 10.0
# A worker that opens its journal waits for its predecessor's lock, and replays accepted operations.
ACTIVATE_TIMEOUT_SECONDS = 600.0


class CallUnknown(WorkerError):
    """The worker does not implement the call."""


_ERRORS: dict[grpc.StatusCode, type[TinsmithError]] = {
    grpc.StatusCode.UNAVAILABLE: WorkerUnavailable,
    grpc.StatusCode.CANCELLED: WorkerUnavailable,
    grpc.StatusCode.FAILED_PRECONDITION: StaleEpoch,
    grpc.StatusCode.NOT_FOUND: ModelNotAtWorker,
    grpc.StatusCode.RESOURCE_EXHAUSTED: WorkerFull,
    grpc.StatusCode.UNIMPLEMENTED: CallUnknown,
    grpc.StatusCode.INVALID_ARGUMENT: Unprocessable,
}


class GrpcWorkerClient(WorkerClient):
    """A client of one worker instance under one epoch."""

    def __init__(self, target: str, tls: WorkerTls | None = None) -> None:
        """Open a channel.

        `target` is `unix:/path`, or `host:port` with `tls`.
        """
        self._channel = open_channel(target, tls)
        self._stub = worker_pb2_grpc.WorkerStub(self._channel)
        self._epoch = 0

    async def activate(self, epoch: int, event_cursor: int = 0) -> str:
        """Activate the worker, and return the instance's id. Raises StaleEpoch.

        Later submissions carry this epoch. The worker reports events after the cursor.
        """
        request = worker_pb2.ActivateRequest(epoch=epoch, event_cursor=event_cursor)
        reply = await _call(self._stub.Activate, request, ACTIVATE_TIMEOUT_SECONDS)
        self._epoch = epoch
        return reply.instance_id

    async def until_broken(self) -> None:
        """Wait until the connection is lost. The next connection may reach another instance."""
        state = self._channel.get_state()
        while state is grpc.ChannelConnectivity.READY:
            await self._channel.wait_for_state_change(state)
            state = self._channel.get_state()

    async def close(self, grace_seconds: float | None = None) -> None:
        """Close the channel. Running calls end immediately, or after the grace period. New calls are refused."""
        await self._channel.close(grace_seconds)

    @override
    async def submit(
        self, request: worker_pb2.SubmitRequest, tenant: str, share_weight: float | None = None
    ) -> worker_pb2.SubmitReply:
        request.epoch = self._epoch
        try:
            reply = await _call(self._stub.Submit, request, SUBMIT_TIMEOUT_SECONDS, tenant, share_weight)
        except WorkerFull as error:
            raise StorageFull(str(error)) from error
        if request.idempotency_key and not reply.seq_id:
            raise Unprocessable(
                "the image of this model's worker cannot number operations: send a seq_id, or ask an administrator "
                "to restart the worker on this server's image"
            )
        return reply

    @override
    async def await_result(self, model_id: str, seq_id: int, timeout_seconds: float) -> worker_pb2.AwaitReply:
        request = worker_pb2.AwaitRequest(model_id=model_id, seq_id=seq_id, timeout_seconds=timeout_seconds)
        return await _call(self._stub.Await, request, timeout_seconds + HOLD_GRACE_SECONDS)

    @override
    async def sample(self, request: worker_pb2.SampleRequest, tenant: str) -> None:
        try:
            await _call(self._stub.Sample, request, QUICK_TIMEOUT_SECONDS, tenant)
        except WorkerFull as error:
            raise TooManySamples(str(error)) from error
        except CallUnknown as error:
            # Another worker may implement the call: one of a changed session, or a replica with a newer image.
            raise WorkerUnavailable(str(error)) from error

    @override
    async def prepare(self, adapter: worker_pb2.AdapterRef) -> None:
        await _call(self._stub.Prepare, worker_pb2.PrepareRequest(adapter=adapter), QUICK_TIMEOUT_SECONDS)

    @override
    async def await_sample(self, request_id: str, timeout_seconds: float) -> worker_pb2.AwaitReply:
        request = worker_pb2.AwaitSampleRequest(request_id=request_id, timeout_seconds=timeout_seconds)
        return await _call(self._stub.AwaitSample, request, timeout_seconds + HOLD_GRACE_SECONDS)

    @override
    async def await_samples(self, request: worker_pb2.AwaitSamplesRequest) -> worker_pb2.AwaitSamplesReply:
        try:
            return await _call(self._stub.AwaitSamples, request, request.timeout_seconds + HOLD_GRACE_SECONDS)
        except CallUnknown as error:
            raise Unprocessable(
                "the image of a sampler of this base model reports only one sample at a time; ask an administrator "
                "to turn the setting session_poller off, or to restart the sampler on this server's image"
            ) from error

    @override
    async def cancel_sample(self, request_id: str) -> None:
        request = worker_pb2.CancelSampleRequest(request_id=request_id)
        await _call(self._stub.CancelSample, request, QUICK_TIMEOUT_SECONDS)

    @override
    async def render_prompt(self, request: worker_pb2.RenderPromptRequest, tenant: str) -> worker_pb2.RenderPromptReply:
        try:
            return await _call(self._stub.RenderPrompt, request, RENDER_TIMEOUT_SECONDS, tenant)
        except CallUnknown as error:
            raise Unprocessable(
                "the sampler of this base model accepts only tokens; ask an administrator to restart it on this "
                "server's image"
            ) from error

    @override
    async def await_text(self, request_id: str, seen: int, timeout_seconds: float) -> worker_pb2.AwaitTextReply:
        request = worker_pb2.AwaitTextRequest(request_id=request_id, seen=seen, timeout_seconds=timeout_seconds)
        return await _call(self._stub.AwaitText, request, timeout_seconds + HOLD_GRACE_SECONDS)

    @override
    async def events(self, after_event_id: int, timeout_seconds: float) -> Sequence[worker_pb2.Event]:
        request = worker_pb2.EventsRequest(after_event_id=after_event_id, timeout_seconds=timeout_seconds)
        return list((await _call(self._stub.Events, request, timeout_seconds + HOLD_GRACE_SECONDS)).events)

    @override
    async def import_adapter(self, request: worker_pb2.ImportAdapterRequest) -> worker_pb2.ImportAdapterReply:
        with _unimplemented_as("cannot import adapters"):
            return await _call(self._stub.ImportAdapter, request, IMPORT_TIMEOUT_SECONDS)

    @override
    async def take_usage(self) -> worker_pb2.TakeUsageReply:
        return await _call(self._stub.TakeUsage, worker_pb2.TakeUsageRequest(), QUICK_TIMEOUT_SECONDS)

    @override
    async def read_tokenizer(self, known_digest: str) -> worker_pb2.ReadTokenizerReply:
        request = worker_pb2.ReadTokenizerRequest(known_digest=known_digest)
        with _unimplemented_as("gives no tokenizer"):
            return await _call(self._stub.ReadTokenizer, request, READ_TIMEOUT_SECONDS)

    @override
    async def timeline(self, session_id: str) -> worker_pb2.TimelineReply:
        request = worker_pb2.TimelineRequest(session_id=session_id)
        return await _call(self._stub.Timeline, request, QUICK_TIMEOUT_SECONDS)

    @override
    async def describe(self) -> worker_pb2.DescribeReply:
        return await _call(self._stub.Describe, worker_pb2.DescribeRequest(), QUICK_TIMEOUT_SECONDS)


@contextmanager
def _unimplemented_as(lacks: str) -> Iterator[None]:
    """Raise Unprocessable with the reason if the worker does not implement the call."""
    try:
        yield
    except CallUnknown as error:
        raise Unprocessable(
            f"the image of this base model's worker {lacks}; ask an administrator to restart it on this server's image"
        ) from error


def _metadata(tenant: str, share_weight: float | None) -> grpc.aio.Metadata:
    metadata = grpc.aio.Metadata((TENANT_METADATA, tenant.encode()))
    if share_weight is not None:
        metadata.add(SHARE_WEIGHT_METADATA, repr(share_weight))
    if traceparent := tracing.current():
        metadata.add(tracing.TRACEPARENT, traceparent)
    return metadata


async def _call(
    method: grpc.aio.UnaryUnaryMultiCallable[Request, Reply],
    request: Request,
    timeout_seconds: float,
    tenant: str | None = None,
    share_weight: float | None = None,
) -> Reply:
    """Make one RPC, and translate a failure into an error of this server."""
    try:
        if tenant is None:
            return await method(request, timeout=timeout_seconds)
        with tracing.span(f"worker {type(request).__name__.removesuffix('Request')}"):
            return await method(request, timeout=timeout_seconds, metadata=_metadata(tenant, share_weight))
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            call = type(request).__name__.removesuffix("Request")
            raise WorkerUnavailable(
                f"the worker has not answered {call} for {timeout_seconds:g} s: it is overloaded, stopped or cut off; "
                "the request is repeated"
            ) from error
        kind = _ERRORS.get(error.code(), WorkerError)
        raise kind(error.details() or f"the worker answered {error.code().name}") from error
    except grpc.aio.UsageError as error:
        raise WorkerUnavailable(CLOSED) from error
    except asyncio.CancelledError:
        # grpc also cancels calls when their channel is closed. Such a cancellation does not concern this task.
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise WorkerUnavailable(CLOSED) from None
