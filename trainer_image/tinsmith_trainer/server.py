"""The gRPC door of a worker: parse, call the service, translate errors. No decisions here."""

from __future__ import annotations

import uuid
from abc import ABC
from typing import Any, NoReturn, TypeAlias

import grpc
import structlog
from tinsmith_rpc import worker_pb2, worker_pb2_grpc
from typing_extensions import override

from tinsmith_trainer.describe import describe, describe_sampler
from tinsmith_trainer.engines.base import BaseModelInfo
from tinsmith_trainer.errors import JournalFull
from tinsmith_trainer.lines import UnknownModel
from tinsmith_trainer.operations import Failure, StoredResult, Success
from tinsmith_trainer.samples import Samples, TooManySamples
from tinsmith_trainer.sampling.base import Sampler
from tinsmith_trainer.service import Draining, NotActive, WorkerService

log = structlog.get_logger(__name__)

MAX_MESSAGE_BYTES = 1024**3
TRAINS_NOTHING = "this process only samples; it trains nothing"
CATEGORIES = {"user": worker_pb2.USER, "server": worker_pb2.SERVER}
STATUS_OF_ERROR: dict[type[Exception], grpc.StatusCode] = {
    NotActive: grpc.StatusCode.FAILED_PRECONDITION,
    Draining: grpc.StatusCode.UNAVAILABLE,
    UnknownModel: grpc.StatusCode.NOT_FOUND,
    JournalFull: grpc.StatusCode.RESOURCE_EXHAUSTED,
    TooManySamples: grpc.StatusCode.RESOURCE_EXHAUSTED,
}

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class SamplingServicer(worker_pb2_grpc.WorkerServicer, ABC):
    """The sampling calls; without samples they are UNIMPLEMENTED."""

    def __init__(self, samples: Samples | None) -> None:
        self._samples = samples

    @override
    async def Sample(self, request: worker_pb2.SampleRequest, context: Context) -> worker_pb2.SampleReply:
        samples = self._samples or await _refuse(context, "this worker does not sample")
        try:
            samples.submit(request)
        except TooManySamples as error:
            await _abort(context, error)
        return worker_pb2.SampleReply()

    @override
    async def AwaitSample(self, request: worker_pb2.AwaitSampleRequest, context: Context) -> worker_pb2.AwaitReply:
        samples = self._samples or await _refuse(context, "this worker does not sample")
        try:
            outcome = await samples.wait(request.request_id, request.timeout_seconds)
        except KeyError:
            return worker_pb2.AwaitReply(not_found=worker_pb2.NotFound())
        if outcome is None:
            return worker_pb2.AwaitReply(pending=worker_pb2.Pending())
        return _reply(outcome)

    @override
    async def CancelSample(
        self, request: worker_pb2.CancelSampleRequest, context: Context
    ) -> worker_pb2.CancelSampleReply:
        samples = self._samples or await _refuse(context, "this worker does not sample")
        samples.cancel(request.request_id)
        return worker_pb2.CancelSampleReply()


class SamplerServicer(SamplingServicer):
    """A process that samples and trains nothing: it has no journal, so no epoch fences it."""

    def __init__(self, sampler: Sampler, samples: Samples, base: BaseModelInfo) -> None:
        super().__init__(samples)
        self._sampler = sampler
        self._base = base
        self._instance_id = uuid.uuid4().hex

    @override
    async def Describe(self, request: worker_pb2.DescribeRequest, context: Context) -> worker_pb2.DescribeReply:
        return describe_sampler(self._instance_id, self._base, self._sampler)

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


class WorkerServicer(SamplingServicer):
    """See `worker.proto` for what each call promises."""

    def __init__(self, service: WorkerService) -> None:
        super().__init__(service.samples)
        self._service = service

    @override
    async def Describe(self, request: worker_pb2.DescribeRequest, context: Context) -> worker_pb2.DescribeReply:
        self._service.heard_from_server()
        return describe(self._service)

    @override
    async def Activate(self, request: worker_pb2.ActivateRequest, context: Context) -> worker_pb2.ActivateReply:
        try:
            await self._service.activate(request.epoch)
        except NotActive as error:
            await _abort(context, error)
        return worker_pb2.ActivateReply(instance_id=self._service.instance_id)

    @override
    async def Submit(self, request: worker_pb2.SubmitRequest, context: Context) -> worker_pb2.SubmitReply:
        self._service.heard_from_server()
        try:
            await self._service.submit(request)
        except (NotActive, Draining, UnknownModel, JournalFull) as error:
            await _abort(context, error)
        return worker_pb2.SubmitReply(epoch=self._service.epoch)

    @override
    async def Await(self, request: worker_pb2.AwaitRequest, context: Context) -> worker_pb2.AwaitReply:
        self._service.heard_from_server()
        try:
            result = await self._service.wait_for(request.model_id, request.seq_id, request.timeout_seconds)
        except KeyError:
            return worker_pb2.AwaitReply(not_found=worker_pb2.NotFound())
        except NotActive as error:
            await _abort(context, error)
        if result is None:
            return worker_pb2.AwaitReply(pending=self._service.pending(request.model_id, request.seq_id))
        return _reply(_outcome(result))

    @override
    async def Events(self, request: worker_pb2.EventsRequest, context: Context) -> worker_pb2.EventsReply:
        self._service.heard_from_server()
        bodies = await self._service.events(request.after_event_id, request.timeout_seconds)
        return worker_pb2.EventsReply(events=[worker_pb2.Event.FromString(body) for body in bodies])


async def serve(servicer: SamplingServicer, address: str) -> grpc.aio.Server:
    """Starts to answer on `address` (`unix:/path` or `host:port`)."""
    options = [
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ]
    server = grpc.aio.server(options=options)
    worker_pb2_grpc.add_WorkerServicer_to_server(servicer, server)
    server.add_insecure_port(address)
    await server.start()
    return server


async def _refuse(context: Context, reason: str) -> NoReturn:
    await context.abort(grpc.StatusCode.UNIMPLEMENTED, reason)
    raise AssertionError("abort returned")


async def _abort(context: Context, error: Exception) -> NoReturn:
    await context.abort(STATUS_OF_ERROR[type(error)], str(error))
    raise AssertionError("abort returned")


def _outcome(result: StoredResult) -> Success | Failure | None:
    if result.failure is not None:
        return result.failure
    return None if result.payload is None else Success(result.payload, result.protobuf)


def _reply(outcome: Success | Failure | None) -> worker_pb2.AwaitReply:
    if outcome is None:
        return worker_pb2.AwaitReply(gone=worker_pb2.Gone(reason="the result was kept for its time and then dropped"))
    if isinstance(outcome, Failure):
        failure = worker_pb2.Failure(category=CATEGORIES[outcome.category], message=outcome.message)
        return worker_pb2.AwaitReply(failure=failure)
    return worker_pb2.AwaitReply(result=worker_pb2.Result(payload=outcome.payload, protobuf=outcome.protobuf))
