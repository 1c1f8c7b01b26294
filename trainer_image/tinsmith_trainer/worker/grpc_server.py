"""The gRPC server of a worker.

The server parses requests, calls the service, and translates errors. The server makes no decisions of its own.
"""

from __future__ import annotations

import asyncio
import math
import uuid
from abc import ABC
from functools import partial
from pathlib import Path
from typing import NoReturn

import grpc
import numpy as np
import structlog
from tinsmith_rpc import SHARE_WEIGHT_METADATA, TENANT_METADATA, tracing, wire_pb2, worker_pb2, worker_pb2_grpc
from typing_extensions import override

from tinsmith_trainer.checkpoints.offered_saves import SaveNotOffered, SaveUnavailable, TooManyStreams
from tinsmith_trainer.engines.base import EngineCapabilities
from tinsmith_trainer.errors import (
    Draining,
    Failure,
    JournalFull,
    SamplerUnready,
    ServerError,
    SnapshotRefused,
    StorageUnavailable,
    UserError,
)
from tinsmith_trainer.oplog.journal_tables import OperationResult
from tinsmith_trainer.oplog.model_queue import UnknownModel
from tinsmith_trainer.sampling.continuations import CannotExtend
from tinsmith_trainer.sampling.language import Language, without_image_tokens
from tinsmith_trainer.sampling.sample_queue import Samples, TooManySamples
from tinsmith_trainer.torch_model.base_model import BaseModelInfo
from tinsmith_trainer.worker.client_activity import ClientActivity, CountCalls
from tinsmith_trainer.worker.metrics import WorkerName, describe, describe_sampler
from tinsmith_trainer.worker.peers import AdmitPeers, Context, is_operator
from tinsmith_trainer.worker.rendering_queue import RenderingQueue
from tinsmith_trainer.worker.service import NotActive, WorkerService
from tinsmith_trainer.worker.tls import TlsDirectory
from tinsmith_trainer.worker.tokenizer_files import read_tokenizer

log = structlog.get_logger(__name__)

MAX_MESSAGE_BYTES = 1024**3
SERVER_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.so_reuseport", 0),  # otherwise two processes could share a port, and each would receive half of the calls
    # Clients ping every 20 s to detect a lost node. By default gRPC treats such pings as an attack.
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
]
TRAINS_NOTHING = "this process only samples; it trains nothing"
SAMPLES_NOTHING = (
    "This worker only trains: it was started without a sampler. "
    "Sample on one that has one (in a TrainingSession, sampling: Colocated)."
)
KNOWS_TOKENS_ALONE = "this worker's sampler knows tokens alone"
CATEGORIES = {"user": worker_pb2.USER, "server": worker_pb2.SERVER}
STATUS_OF_ERROR: dict[type[Exception], grpc.StatusCode] = {
    NotActive: grpc.StatusCode.FAILED_PRECONDITION,
    Draining: grpc.StatusCode.UNAVAILABLE,
    SamplerUnready: grpc.StatusCode.UNAVAILABLE,
    UnknownModel: grpc.StatusCode.NOT_FOUND,
    JournalFull: grpc.StatusCode.RESOURCE_EXHAUSTED,
    SnapshotRefused: grpc.StatusCode.INTERNAL,
    SaveNotOffered: grpc.StatusCode.NOT_FOUND,
    TooManyStreams: grpc.StatusCode.RESOURCE_EXHAUSTED,
    TooManySamples: grpc.StatusCode.RESOURCE_EXHAUSTED,
    UserError: grpc.StatusCode.INVALID_ARGUMENT,
    StorageUnavailable: grpc.StatusCode.UNAVAILABLE,
    ServerError: grpc.StatusCode.INTERNAL,
}
"""The gRPC status of each class of errors. An error of another class has the status of the nearest base class."""


class SamplingServicer(worker_pb2_grpc.WorkerServicer, ABC):
    """The calls for samples, and the calls for files of the base model.

    A server without a sampler refuses sample requests.
    """

    def __init__(self, samples: Samples | None, base: BaseModelInfo, activity: ClientActivity) -> None:
        self.activity = activity
        self._samples = samples
        self._model_directory = Path(base.directory or base.path)
        self._rendering = RenderingQueue()

    @override
    async def Sample(self, request: worker_pb2.SampleRequest, context: Context) -> worker_pb2.SampleReply:
        samples = self._samples or await _refuse(context, SAMPLES_NOTHING)
        try:
            samples.submit(request, tenant_of(context), traceparent_of(context))
        except (TooManySamples, Draining, SamplerUnready) as error:
            await _abort(context, error)
        return worker_pb2.SampleReply()

    @override
    async def AwaitSample(self, request: worker_pb2.AwaitSampleRequest, context: Context) -> worker_pb2.AwaitReply:
        if self._samples is None:
            return worker_pb2.AwaitReply(not_found=worker_pb2.NotFound())
        try:
            outcome = await self._samples.wait(request.request_id, request.timeout_seconds)
        except KeyError:
            return worker_pb2.AwaitReply(not_found=worker_pb2.NotFound())
        if outcome is None:
            reason = self._samples.sampler.unready_reason or ""
            return worker_pb2.AwaitReply(pending=worker_pb2.Pending(reason=reason, paused_capacity=bool(reason)))
        if isinstance(outcome, Failure):
            return _failed(outcome)
        return worker_pb2.AwaitReply(result=worker_pb2.Result(payload=outcome, protobuf=True))

    @override
    async def AwaitSamples(
        self, request: worker_pb2.AwaitSamplesRequest, context: Context
    ) -> worker_pb2.AwaitSamplesReply:
        if self._samples is None:
            ended = [worker_pb2.EndedSample(request_id=one, failed=True) for one in request.expected]
            return worker_pb2.AwaitSamplesReply(any=bool(ended), ended=ended)
        return await self._samples.ended(request)

    @override
    async def RenderPrompt(
        self, request: worker_pb2.RenderPromptRequest, context: Context
    ) -> worker_pb2.RenderPromptReply:
        samples = self._samples or await _refuse(context, SAMPLES_NOTHING)
        language = samples.sampler.language or await _refuse(context, KNOWS_TOKENS_ALONE)
        try:
            render = partial(_rendered, language, request)
            return await self._rendering.run(tenant_of(context), request.ByteSize(), render)
        except UserError as error:
            await _abort(context, error)

    @override
    async def AwaitText(self, request: worker_pb2.AwaitTextRequest, context: Context) -> worker_pb2.AwaitTextReply:
        if self._samples is None:
            return worker_pb2.AwaitTextReply(not_found=worker_pb2.NotFound())
        try:
            read = await self._samples.read(request.request_id, request.seen, request.timeout_seconds)
        except KeyError:
            return worker_pb2.AwaitTextReply(not_found=worker_pb2.NotFound())
        reply = worker_pb2.AwaitTextReply(pieces=read.pieces, sampled_tokens=read.tokens)
        match read.result:
            case None:
                reply.pending.SetInParent()
            case Failure(category, message):
                reply.failure.CopyFrom(worker_pb2.Failure(category=CATEGORIES[category], message=message))
            case payload:
                response = wire_pb2.SampleResponse.FromString(payload)
                reply.end.prompt_cache_hit_tokens = response.prompt_cache_hit_tokens
                reply.end.sequences.extend(response.sequences if read.with_sequences else ())
                reply.end.SetInParent()
        return reply

    @override
    async def CancelSample(
        self, request: worker_pb2.CancelSampleRequest, context: Context
    ) -> worker_pb2.CancelSampleReply:
        if self._samples is not None:
            self._samples.cancel(request.request_id)
        return worker_pb2.CancelSampleReply()

    @override
    async def Prepare(self, request: worker_pb2.PrepareRequest, context: Context) -> worker_pb2.PrepareReply:
        samples = self._samples or await _refuse(context, SAMPLES_NOTHING)
        samples.prepare(request.adapter)
        return worker_pb2.PrepareReply()

    @override
    async def ReadTokenizer(
        self, request: worker_pb2.ReadTokenizerRequest, context: Context
    ) -> worker_pb2.ReadTokenizerReply:
        try:
            found = await asyncio.to_thread(read_tokenizer, self._model_directory)
        except (UserError, ServerError) as error:
            await _abort(context, error)
        files = {} if found.digest == request.known_digest else found.files
        return worker_pb2.ReadTokenizerReply(digest=found.digest, files=files)


class SamplerServicer(SamplingServicer):
    """The calls of a process that samples and does not train.

    A process that only samples has no journal, and therefore no epoch.
    """

    def __init__(
        self, samples: Samples, base: BaseModelInfo, capabilities: EngineCapabilities, name: WorkerName
    ) -> None:
        super().__init__(samples, base, ClientActivity())
        self._taken = samples
        self._name = name
        self._base = base
        self._capabilities = capabilities
        self._instance_id = uuid.uuid4().hex

    @override
    async def Describe(self, request: worker_pb2.DescribeRequest, context: Context) -> worker_pb2.DescribeReply:
        idle_seconds = self.activity.idle_seconds(works=self._taken.unfinished > 0)
        return describe_sampler(
            self._instance_id, self._name, self._base, self._capabilities, self._taken, idle_seconds
        )

    @override
    async def TakeUsage(self, request: worker_pb2.TakeUsageRequest, context: Context) -> worker_pb2.TakeUsageReply:
        return self._taken.usage.take()

    @override
    async def Timeline(self, request: worker_pb2.TimelineRequest, context: Context) -> worker_pb2.TimelineReply:
        return worker_pb2.TimelineReply(spans=self._taken.timeline(request.session_id))

    @override
    async def Activate(self, request: worker_pb2.ActivateRequest, context: Context) -> worker_pb2.ActivateReply:
        return await _refuse(context, TRAINS_NOTHING)

    @override
    async def Submit(self, request: worker_pb2.SubmitRequest, context: Context) -> worker_pb2.SubmitReply:
        return await _refuse(context, TRAINS_NOTHING)

    @override
    async def Await(self, request: worker_pb2.AwaitRequest, context: Context) -> worker_pb2.AwaitReply:
        return await _refuse(context, TRAINS_NOTHING)

    @override
    async def Events(self, request: worker_pb2.EventsRequest, context: Context) -> worker_pb2.EventsReply:
        return await _refuse(context, TRAINS_NOTHING)

    @override
    async def StreamSave(  # type: ignore[override]  # the stubs know generators alone
        self, request: worker_pb2.StreamSaveRequest, context: Context
    ) -> None:
        await _refuse(context, TRAINS_NOTHING)

    @override
    async def ImportAdapter(
        self, request: worker_pb2.ImportAdapterRequest, context: Context
    ) -> worker_pb2.ImportAdapterReply:
        return await _refuse(context, TRAINS_NOTHING)

    @override
    async def Snapshot(self, request: worker_pb2.SnapshotRequest, context: Context) -> worker_pb2.SnapshotReply:
        return await _refuse(context, TRAINS_NOTHING)


class WorkerServicer(SamplingServicer):
    """The calls of a worker. `worker.proto` specifies each call."""

    def __init__(self, service: WorkerService, name: WorkerName) -> None:
        super().__init__(service.samples, service.parts.engine.base_model(), service.activity)
        self._service = service
        self._name = name

    @override
    async def Describe(self, request: worker_pb2.DescribeRequest, context: Context) -> worker_pb2.DescribeReply:
        # gaps close after time in which clients could reach the worker; calls of the operator do not show that they
        # could
        if not is_operator(context):
            self._service.note_contact()
        return describe(self._service, self._name)

    @override
    async def TakeUsage(self, request: worker_pb2.TakeUsageRequest, context: Context) -> worker_pb2.TakeUsageReply:
        return self._service.accounting.meter.take()

    @override
    async def Timeline(self, request: worker_pb2.TimelineRequest, context: Context) -> worker_pb2.TimelineReply:
        service = self._service
        return await service.accounting.timeline(request.session_id, service.queues.unreleased(), service.samples)

    @override
    async def Activate(self, request: worker_pb2.ActivateRequest, context: Context) -> worker_pb2.ActivateReply:
        try:
            await self._service.activate(request.epoch, request.event_cursor)
        except (NotActive, Draining, JournalFull) as error:
            await _abort(context, error)
        return worker_pb2.ActivateReply(instance_id=self._service.instance_id)

    @override
    async def Submit(self, request: worker_pb2.SubmitRequest, context: Context) -> worker_pb2.SubmitReply:
        self._service.note_contact()
        try:
            about = tenant_of(context), share_weight_of(context), traceparent_of(context)
            number = await self._service.submit(request, *about)
        except (NotActive, Draining, UnknownModel, JournalFull) as error:
            await _abort(context, error)
        return worker_pb2.SubmitReply(epoch=self._service.epoch, seq_id=number)

    @override
    async def Await(self, request: worker_pb2.AwaitRequest, context: Context) -> worker_pb2.AwaitReply:
        self._service.note_contact()
        try:
            result = await self._service.wait_for(request.model_id, request.seq_id, request.timeout_seconds)
        except KeyError:
            return worker_pb2.AwaitReply(not_found=worker_pb2.NotFound())
        except NotActive as error:
            await _abort(context, error)
        if result is None:
            return worker_pb2.AwaitReply(pending=self._service.pending(request.model_id, request.seq_id))
        return _reply(result)

    @override
    async def Events(self, request: worker_pb2.EventsRequest, context: Context) -> worker_pb2.EventsReply:
        self._service.note_contact()
        bodies = await self._service.events(request.after_event_id, request.timeout_seconds)
        return worker_pb2.EventsReply(events=[worker_pb2.Event.FromString(body) for body in bodies])

    @override
    async def StreamSave(  # type: ignore[override]  # the stubs know generators alone
        self, request: worker_pb2.StreamSaveRequest, context: Context
    ) -> None:
        """Stream a save.

        The call writes the stream itself, so that the call ends at once when the caller cancels it. A generator would
        continue to run after a cancellation.
        """
        try:
            async with self._service.parts.offered_saves.streaming(request.manifest_digest) as offer:
                await context.write(worker_pb2.SavePart(manifest=offer.manifest))
                for part in offer.parts():
                    await context.write(worker_pb2.SavePart(content=part))
        except SaveUnavailable as error:
            await _abort(context, error)

    @override
    async def ImportAdapter(
        self, request: worker_pb2.ImportAdapterRequest, context: Context
    ) -> worker_pb2.ImportAdapterReply:
        try:
            return await self._service.import_adapter(request)
        except (UserError, StorageUnavailable, ServerError, NotActive, Draining) as error:
            await _abort(context, error)

    @override
    async def Snapshot(self, request: worker_pb2.SnapshotRequest, context: Context) -> worker_pb2.SnapshotReply:
        try:
            return worker_pb2.SnapshotReply(last_snapshot_time=await self._service.snapshot())
        except (NotActive, Draining, JournalFull, SnapshotRefused) as error:
            await _abort(context, error)


def tenant_of(context: Context) -> str:
    """Return the tenant of a call, or an empty text if the tenant is unknown."""
    for name, value in context.invocation_metadata() or ():
        if name == TENANT_METADATA:
            assert isinstance(value, bytes)  # gRPC's rule for metadata names with the ending "-bin"
            return value.decode(errors="replace")
    return ""


def share_weight_of(context: Context) -> float:
    """Return the weight of the tenant's share. The weight is 1 if the call names none, or none that is possible."""
    for name, value in context.invocation_metadata() or ():
        if name == SHARE_WEIGHT_METADATA:
            try:
                weight = float(value)
            except ValueError:
                return 1.0
            return weight if 0 < weight < math.inf else 1.0
    return 1.0


def traceparent_of(context: Context) -> str:
    """Return the caller's span, or an empty text if this process makes no traces."""
    if not tracing.is_on():
        return ""
    metadata = context.invocation_metadata() or ()
    return next((str(value) for name, value in metadata if name == tracing.TRACEPARENT), "")


async def serve(servicer: SamplingServicer, address: str, tls: TlsDirectory | None = None) -> grpc.aio.Server:
    """Start the server on `unix:/path`, or on `host:port` with `tls`. Raises ServerError if the address is in use."""
    # A call that is refused is no use, so the peers are checked first.
    interceptors = [*([AdmitPeers()] if tls else []), CountCalls(servicer.activity)]
    server = grpc.aio.server(interceptors=interceptors, options=SERVER_OPTIONS)
    worker_pb2_grpc.add_WorkerServicer_to_server(servicer, server)
    try:
        if tls is None:
            server.add_insecure_port(address)
        else:
            server.add_secure_port(address, tls.credentials())
    except RuntimeError as error:
        await server.stop(grace=0)
        raise ServerError(f"Nothing can be served on {address}: {error}. Choose a free address.") from error
    await server.start()
    return server


def _rendered(language: Language, request: worker_pb2.RenderPromptRequest) -> worker_pb2.RenderPromptReply:
    """Return the prompt's tokens, or only the tokens after the recorded tokens. Raises UserError."""
    obstacle = worker_pb2.NO_OBSTACLE
    try:
        tokens = language.extend(request) if request.HasField("recorded") else language.render(request)
    except CannotExtend as error:
        tokens, obstacle = language.render(request), error.obstacle
    reply = worker_pb2.RenderPromptReply(end_tokens=language.eos_token_ids, obstacle=obstacle)
    if request.images:
        tokens, positions = without_image_tokens(tokens, language.image_token, request.images)
        reply.image_positions.extend(positions)
    reply.tokens = np.array(tokens, "<i4").tobytes()
    return reply


async def _refuse(context: Context, reason: str) -> NoReturn:
    await context.abort(grpc.StatusCode.UNIMPLEMENTED, reason)
    raise AssertionError("abort returned")


async def _abort(context: Context, error: Exception) -> NoReturn:
    status = next(STATUS_OF_ERROR[kind] for kind in type(error).__mro__ if kind in STATUS_OF_ERROR)
    await context.abort(status, str(error))
    raise AssertionError("abort returned")


def _reply(result: OperationResult) -> worker_pb2.AwaitReply:
    if result.failure is not None:
        return _failed(result.failure)
    if result.payload is None:
        return worker_pb2.AwaitReply(gone=worker_pb2.Gone(reason="the result was kept for its time and then dropped"))
    message = worker_pb2.Result(payload=result.payload, protobuf=result.protobuf, event_id=result.event_id)
    return worker_pb2.AwaitReply(result=message)


def _failed(failure: Failure) -> worker_pb2.AwaitReply:
    message = worker_pb2.Failure(category=CATEGORIES[failure.category], message=failure.message)
    return worker_pb2.AwaitReply(failure=message)
