"""The answers of `retrieve_future`: the state of an operation or a sample.

A poll is held until the operation or sample ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import orjson
from tinsmith_rpc import RELEASE_SEQ_ID, worker_pb2

from tinsmith_server.errors import Gone, ModelNotAtWorker, NotFound, StorageFull, WorkerAbsent, WorkerUnavailable
from tinsmith_server.fleet.base import Fleet
from tinsmith_server.services.checkpoints.worker_events import Events
from tinsmith_server.services.failures import Failure
from tinsmith_server.services.polling.long_polls import STOPPING, LongPolls, Pending, SharedCalls
from tinsmith_server.services.sampling.sampling import Sampling
from tinsmith_server.services.training.binding import Binding
from tinsmith_server.services.training.custom_losses import CustomLosses
from tinsmith_server.services.training.models import Models
from tinsmith_server.services.training.submission import Submission
from tinsmith_server.store.records import Model
from tinsmith_server.wire.ids import CustomLossId, OperationId, SampleId, parse_request_id

# Above this size a client that supports it gets only the size at first. It fetches the result when it has enough
# memory.
METADATA_THRESHOLD_BYTES = 64 * 1024
# This pause prevents a busy loop if a worker answers "pending" too early.
PAUSE_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Ready:
    payload: bytes
    protobuf: bool


@dataclass(frozen=True, slots=True)
class Metadata:
    size_bytes: int


ENDED = frozenset({"released", "corrupted"})

Answer = Pending | Ready | Metadata | Failure
WorkerCall = Callable[[], Awaitable[worker_pb2.AwaitReply]]
"""A call that waits for an answer while the poll is held."""


class Futures:
    """Answers to polls. A result can be fetched any number of times."""

    def __init__(
        self,
        *,
        models: Models,
        submission: Submission,
        custom_losses: CustomLosses,
        sampling: Sampling,
        binding: Binding,
        fleet: Fleet,
        events: Events,
        long_polls: LongPolls,
        hold_seconds: float,
    ) -> None:
        self._models = models
        self._submission = submission
        self._custom_losses = custom_losses
        self._sampling = sampling
        self._binding = binding
        self._fleet = fleet
        self._events = events
        self._long_polls = long_polls
        self._hold_seconds = hold_seconds
        # The calls by model and number.
        self._worker_calls: SharedCalls[tuple[str, int], worker_pb2.AwaitReply] = SharedCalls()

    async def retrieve(self, tenant: str, request_id: str, *, allow_metadata_only: bool) -> Answer:
        """Return the answer of the future.

        Raises NotFound for an unknown future, and Gone for a result that is not kept any more.
        """
        answer = await self._long_polls.hold(self._retrieve(tenant, request_id), released=STOPPING)
        if isinstance(answer, Pending):
            return self._long_polls.with_notice(answer, owner=request_id.rpartition(":")[0])
        if allow_metadata_only and isinstance(answer, Ready) and len(answer.payload) > METADATA_THRESHOLD_BYTES:
            return Metadata(len(answer.payload))
        return answer

    async def cancel(self, tenant: str, request_id: str) -> bool:
        """Stop a sample. Returns False for a training operation, which cannot be cancelled."""
        match parse_request_id(request_id):
            case SampleId() as sample:
                await self._sampling.cancel(tenant, sample)
                return True
            case OperationId() as operation:
                await self._models.owned(tenant, operation.model_id)
                return False
            case CustomLossId() as loss:
                await self._custom_losses.owned(tenant, loss)
                return False
        raise NotFound(f"there is no future {request_id}")

    async def _retrieve(self, tenant: str, request_id: str) -> Answer:
        deadline = asyncio.get_running_loop().time() + self._hold_seconds
        match parse_request_id(request_id):
            case OperationId(model_id, number) if number == RELEASE_SEQ_ID:
                return await self._unloaded(await self._models.owned(tenant, model_id), deadline)
            case OperationId(model_id, number):
                model = await self._models.at_work(tenant, model_id)
                return await self._operation(model, number, deadline)
            case SampleId() as sample:
                return await self._sample(tenant, sample, deadline)
            case CustomLossId() as loss:
                return Ready(await self._custom_losses.result(tenant, loss), protobuf=False)
        raise NotFound(f"there is no future {request_id}")

    async def _unloaded(self, model: Model, deadline: float) -> Answer:
        """Return the answer of a release, if the worker has released the model and the store has recorded this."""
        if model.state == "bound" and not self._outlives_its_worker(model):
            reply = await self._await_worker_result(model, RELEASE_SEQ_ID, deadline)
            if reply.WhichOneof("state") == "pending":
                return Pending.from_worker(reply.pending)
            # The model's saves must be in the store before the model ends.
            await self._events.drain(model.worker_id)
            await self._models.end(model)
        return Ready(orjson.dumps({"model_id": model.model_id, "type": "unload_model"}), protobuf=False)

    async def _operation(self, model: Model, seq_id: int, deadline: float) -> Answer:
        model = await self._binding.wait_until_bound(model, _remaining(deadline))
        if model.state == "accepted":
            reason = self._binding.reason(model)
            return Pending(reason, paused=reason is not None, show_now=reason is not None)
        if model.state == "failed" or self._outlives_its_worker(model):
            return _ended(model)
        reply = await self._await_worker_result(model, seq_id, deadline)
        return await self._answer(model, seq_id, reply, deadline)

    async def _answer(self, model: Model, seq_id: int, reply: worker_pb2.AwaitReply, deadline: float) -> Answer:
        match reply.WhichOneof("state"):
            case "result":
                return await self._finished(model, reply.result, deadline)
            case "failure":
                failure = Failure.from_worker(reply.failure)
                if seq_id == 0:
                    await self._models.fail(model, failure)
                return failure
            case "gone":
                raise Gone(reply.gone.reason or f"the result of {model.model_id}:op:{seq_id} is no longer kept")
            case "not_found":
                return await self._unknown(model, seq_id, deadline)
        return Pending.from_worker(reply.pending)

    async def _finished(self, model: Model, result: worker_pb2.Result, deadline: float) -> Answer:
        """Return the result after the store has recorded the result.

        The client can then list and load a saved checkpoint.
        """
        try:
            await self._events.drain_for(model.worker_id, result, _remaining(deadline))
        except WorkerUnavailable as error:
            await asyncio.sleep(_remaining(deadline))
            return Pending(str(error), paused=True)
        return Ready(result.payload, result.protobuf)

    async def _unknown(self, model: Model, seq_id: int, deadline: float) -> Answer:
        """Return the answer for an operation or a model that the worker does not know."""
        model = await self._models.owned(model.tenant, model.model_id)
        if model.state in ENDED:
            return _ended(model)
        waiting = await self._deliver(model, seq_id, deadline)
        if waiting is not None:
            return waiting
        # Another server may have delivered the operation since the worker's answer.
        reply = await self._await_worker_result(model, seq_id, deadline)
        if reply.WhichOneof("state") != "not_found":
            return await self._answer(model, seq_id, reply, deadline)
        creation = await self._await_worker_result(model, 0, deadline)
        if creation.WhichOneof("state") in {"not_found", "failure"}:
            settled = await self._models.settle_missing(model, creation)
            return Failure.from_row(settled.failure)
        raise NotFound(f"there is no future {OperationId(model.model_id, seq_id)}")

    async def _deliver(self, model: Model, seq_id: int, deadline: float) -> Pending | None:
        """Deliver the operation if it is deferred. Return why it still waits, or None."""
        try:
            await self._submission.deliver_if_deferred(model, seq_id)
        except ModelNotAtWorker:
            return None
        except (WorkerUnavailable, StorageFull) as error:
            await asyncio.sleep(_remaining(deadline))
            return Pending(str(error), paused=True)
        return None

    async def _sample(self, tenant: str, sample: SampleId, deadline: float) -> Answer:
        async def call_worker() -> worker_pb2.AwaitReply:
            return await self._sampling.await_result(tenant, sample, deadline)

        reply = await self._repeat_while_pending(call_worker, deadline)
        match reply.WhichOneof("state"):
            case "result":
                return Ready(reply.result.payload, reply.result.protobuf)
            case "failure":
                return Failure.from_worker(reply.failure)
            case "gone" | "not_found":
                # Samples exist only in their sampler's memory. After a 410 the SDK submits the sample again.
                raise Gone(f"the sampler has been restarted since {sample} was submitted, or its result is too old")
        return Pending.from_worker(reply.pending)

    def _outlives_its_worker(self, model: Model) -> bool:
        """Return whether the model has ended and its results were lost together with its worker."""
        if model.state not in ENDED:
            return False
        try:
            self._fleet.worker(model.worker_id)
        except WorkerAbsent:
            return True
        return False

    async def _await_worker_result(self, model: Model, seq_id: int, deadline: float) -> worker_pb2.AwaitReply:
        async def await_result() -> worker_pb2.AwaitReply:
            worker = await self._fleet.worker(model.worker_id).connection(_remaining(deadline))
            return await worker.await_result(model.model_id, seq_id, _remaining(deadline))

        async def call_worker() -> worker_pb2.AwaitReply:
            """Ask the worker once for all callers.

            The deadline of the first caller applies, because it is the earliest.
            """
            return await self._worker_calls.result((model.model_id, seq_id), await_result)

        return await self._repeat_while_pending(call_worker, deadline)

    async def _repeat_while_pending(self, call_worker: WorkerCall, deadline: float) -> worker_pb2.AwaitReply:
        """Repeat the call until the answer is not "pending" or the poll must be answered.

        If the worker cannot be reached, return "pending" with a reason after the full hold. The SDK would immediately
        repeat a poll that got a 5xx.
        """
        while True:
            remaining = _remaining(deadline)
            try:
                reply = await call_worker()
            except WorkerUnavailable as error:
                reply = worker_pb2.AwaitReply(pending=worker_pb2.Pending(reason=str(error), paused_capacity=True))
            if reply.WhichOneof("state") != "pending" or remaining <= 0:
                return reply
            await asyncio.sleep(min(PAUSE_SECONDS, _remaining(deadline)))


def _ended(model: Model) -> Failure:
    """Return the failure of a model that has ended. Raises Gone for a released model."""
    if model.state == "released":
        if model.failure is not None:
            raise Gone(Failure.from_row(model.failure).message)
        raise Gone(f"{model.model_id} has been released, and its results with it; load its last checkpoint")
    return Failure.from_row(model.failure)


def _remaining(deadline: float) -> float:
    return max(0.0, deadline - asyncio.get_running_loop().time())
