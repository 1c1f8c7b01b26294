"""Calls to workers over mutual TLS: Describe once a minute, and Snapshot when a user requests a snapshot."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import lru_cache
from typing import Generic, NamedTuple, TypeVar

import grpc
from tinsmith_rpc import worker_pb2, worker_pb2_grpc
from typing_extensions import override

from tinsmith_operator.api.names import worker_dns_name
from tinsmith_operator.ca.certificates import Leaf
from tinsmith_operator.common.observed import ModelStep, SnapshotAnswer, WorkerReport
from tinsmith_operator.errors import OperatorError
from tinsmith_operator.kube.resources import Key
from tinsmith_operator.logs import get_logger, outside_of_reconciles

DESCRIBE_TIMEOUT_SECONDS = 10.0
# A snapshot waits for the running operation.
SNAPSHOT_TIMEOUT_SECONDS = 600.0
# The answers of a worker that does not know the call, or that does not let the operator use it.
NEVER = frozenset({grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.PERMISSION_DENIED})
# The pause between calls while a deletion waits for a report.
CLOSE_PERIOD_SECONDS = 3.0
SNAPSHOT_RETRY_SECONDS = 5.0
# An open channel takes 100 KB. After a start all workers are to be called at once.
CALLS_AT_ONCE = 100

log = get_logger(__name__)

DetailT = TypeVar("DetailT")
AnswerT = TypeVar("AnswerT")


@dataclass(frozen=True)
class Target:
    """A worker to call: the pod, the network address, and the worker ID that the worker's certificate must contain."""

    pod_uid: str
    address: str
    worker_id: str


class Silent(Exception):
    """An error for a worker that did not answer."""


class CannotSnapshot(Exception):
    """An error for a worker that cannot take a snapshot on request.

    The message says why the worker cannot take a snapshot, and what to do.
    """


Describe = Callable[[Target], Awaitable[WorkerReport]]
"""A function that returns the report of a worker. Raises Silent."""

TakeSnapshot = Callable[[Target], Awaitable[datetime]]
"""A function that requests a snapshot and returns the time at which all data was on disk.

Raises Silent and CannotSnapshot.
"""


class WorkerCalls(ABC, Generic[DetailT, AnswerT]):
    """Repeated calls to one worker for each session, and the worker's latest answer. Only the leader calls workers.

    Answers are kept only in memory. `on_answer` is called with the session that has a new answer.
    """

    def __init__(self, on_answer: Callable[[Key], None], leads: Callable[[], bool]) -> None:
        self._on_answer = on_answer
        self._leads = leads
        self._followed: dict[Key, tuple[Target, DetailT]] = {}
        self._tasks: dict[Key, asyncio.Task[None]] = {}
        self._answers: dict[Key, AnswerT] = {}

    @abstractmethod
    async def _call(self, key: Key, target: Target, detail: DetailT) -> AnswerT:
        """Call the worker once. Raises Silent and OperatorError."""

    @abstractmethod
    def _pause_seconds(self, detail: DetailT, *, answered: bool) -> float | None:
        """Return the seconds until the next call, or None if no further call is needed."""

    def _is_news(self, before: AnswerT | None, answer: AnswerT, detail: DetailT) -> bool:
        """Return whether the session must be reconciled because of the answer."""
        return True

    def answer(self, key: Key) -> AnswerT | None:
        """Return the latest answer of the worker of the session."""
        return self._answers.get(key)

    def forget(self, key: Key) -> None:
        self._stop(key)
        self._answers.pop(key, None)

    def end(self) -> None:
        """Stop all calls and forget the answers, because another operator leads now."""
        for key in list(self._followed):
            self._stop(key)
        self._answers.clear()

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        self.end()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _begin(self, key: Key, call: tuple[Target, DetailT] | None) -> bool:
        """Call this worker, and no other worker of the session, from now on.

        Return False if this worker was already called.
        """
        # This operator may have lost the lead after a reconcile began. Such a reconcile must not start calls.
        call = call if self._leads() else None
        if self._followed.get(key) == call:
            return False
        self._stop(key)
        if call is not None:
            self._followed[key] = call
            self._tasks[key] = asyncio.create_task(
                self._run(key, *call), name=f"{type(self).__name__} {key.name}", context=outside_of_reconciles()
            )
        return True

    def _stop(self, key: Key) -> None:
        self._followed.pop(key, None)
        task = self._tasks.pop(key, None)
        if task is not None:
            task.cancel()

    async def _run(self, key: Key, target: Target, detail: DetailT) -> None:
        while True:
            answered = await self._attempt(key, target, detail)
            pause_seconds = self._pause_seconds(detail, answered=answered)
            if pause_seconds is None:
                return
            await asyncio.sleep(pause_seconds)

    async def _attempt(self, key: Key, target: Target, detail: DetailT) -> bool:
        where = {**key._asdict(), "calls": type(self).__name__, "address": target.address}
        before = self._answers.get(key)
        try:
            self._answers[key] = answer = await self._call(key, target, detail)
        except (Silent, OperatorError) as error:
            log.info("worker did not answer", **where, error=str(error))
            return False
        except Exception:
            # No code awaits this task. If it ended here, the worker's latest answer would stay forever.
            log.exception("call of a worker failed", **where)
            return False
        if self._is_news(before, answer, detail):
            self._on_answer(key)
        return True


class Period(NamedTuple):
    """The seconds between two calls. If `is_awaited` is true, a decision waits for each report, whatever it says."""

    seconds: float
    is_awaited: bool


class Reports(WorkerCalls[Period, WorkerReport]):
    """The reports of all workers; each worker reports once in each period.

    If a worker does not answer, the worker's latest report is kept. A session whose worker rests and reports the same
    as before is not reconciled.
    """

    def __init__(
        self,
        describe: Describe,
        period_seconds: float,
        on_answer: Callable[[Key], None],
        leads: Callable[[], bool] = lambda: True,
        note: Callable[[Key, WorkerReport], None] = lambda _key, _report: None,
    ) -> None:
        """Start with no reports. `note` is called with each report, also with a report without news."""
        super().__init__(on_answer, leads)
        self._note = note
        self._describe = describe
        self._period_seconds = period_seconds

    def follow(
        self, key: Key, target: Target | None, *, closely: bool = False, at_most_seconds: float | None = None
    ) -> None:
        """Call this worker from now on, at least once in `at_most_seconds`.

        `target` None ends the calls. If the worker is the same as before, nothing changes.

        If `closely` is true, a deletion or a suspension waits for the next report. While it waits, calls are frequent,
        and earlier reports are forgotten.
        """
        periods = [self._period_seconds, at_most_seconds, CLOSE_PERIOD_SECONDS if closely else None]
        seconds = min(period for period in periods if period is not None)
        period = Period(seconds, closely or at_most_seconds is not None)
        changed = self._begin(key, (target, period) if target is not None else None)
        if changed and closely:
            # Reports are dated by this process's clock, and deletions by the API server's. The two clocks may differ.
            self._answers.pop(key, None)

    @override
    async def _call(self, key: Key, target: Target, detail: Period) -> WorkerReport:
        report = await self._describe(target)
        self._note(key, report)
        return report

    @override
    def _pause_seconds(self, detail: Period, *, answered: bool) -> float:
        return detail.seconds

    @override
    def _is_news(self, before: WorkerReport | None, answer: WorkerReport, detail: Period) -> bool:
        # A worker that computes may hang.
        if before is None or detail.is_awaited or answer.running_seconds > 0:
            return True
        same = replace(
            before,
            received_at=answer.received_at,
            running_seconds=answer.running_seconds,
            idle_seconds=answer.idle_seconds,
        )
        return same != answer


class Snapshots(WorkerCalls[str, SnapshotAnswer]):
    """The snapshots that users have requested.

    Each request is sent to the worker of its session until the worker answers.

    An operator that takes over before the status records the request sends the request once more. A second request
    costs little, because a worker writes only data that has changed.
    """

    def __init__(
        self, take: TakeSnapshot, on_answer: Callable[[Key], None], leads: Callable[[], bool] = lambda: True
    ) -> None:
        super().__init__(on_answer, leads)
        self._take = take

    def request(self, key: Key, target: Target | None, request: str | None) -> None:
        """Request a snapshot from this worker. `worker` None ends the calls.

        A request that is the same as before changes nothing.
        """
        self._begin(key, (target, request) if target is not None and request is not None else None)

    @override
    async def _call(self, key: Key, target: Target, detail: str) -> SnapshotAnswer:
        try:
            answer = SnapshotAnswer(detail, await self._take(target))
        except CannotSnapshot as error:
            answer = SnapshotAnswer(detail, None, str(error))
        log.info("snapshot answered", **key._asdict(), request=detail, problem=answer.problem)
        return answer

    @override
    def _pause_seconds(self, detail: str, *, answered: bool) -> float | None:
        return None if answered else SNAPSHOT_RETRY_SECONDS


def open_channel(leaf: Leaf, target: Target) -> grpc.aio.Channel:
    """Open a channel that accepts only this worker, with the operator's certificate.

    The channel is closed after the call: a thousand open channels would take 100 MB.
    """
    options = [
        ("grpc.ssl_target_name_override", worker_dns_name(target.worker_id)),
        ("grpc.enable_http_proxy", 0),
    ]
    return grpc.aio.secure_channel(target.address, _credentials(leaf), options=options)


@lru_cache(maxsize=2)
def _credentials(leaf: Leaf) -> grpc.ChannelCredentials:
    """Return the credentials for all channels. New credentials for each channel would double the time of a call."""
    return grpc.ssl_channel_credentials(leaf.authority, leaf.key, leaf.certificate)


class GrpcDescriber:
    """A caller of Describe over gRPC, with the operator's certificate.

    `clock` dates the reports. Decisions compare these times with theirs, so both use one clock.
    """

    def __init__(self, leaf: Callable[[], Leaf], clock: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        self._leaf = leaf
        self._clock = clock
        self._places = asyncio.Semaphore(CALLS_AT_ONCE)

    async def __call__(self, target: Target) -> WorkerReport:
        async with self._places, open_channel(self._leaf(), target) as channel:
            stub = worker_pb2_grpc.WorkerStub(channel)
            try:
                reply = await stub.Describe(worker_pb2.DescribeRequest(), timeout=DESCRIBE_TIMEOUT_SECONDS)
            except grpc.aio.AioRpcError as error:
                raise Silent(f"{error.code().name}: {error.details()}") from error
        return parse_reply(reply, target.pod_uid, self._clock())


class GrpcSnapshots:
    """A caller of Snapshot over gRPC, with the operator's certificate."""

    def __init__(self, leaf: Callable[[], Leaf], clock: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        self._leaf = leaf
        self._clock = clock

    async def __call__(self, target: Target) -> datetime:
        """Request a snapshot.

        Return the time at which all data from before the call was on disk.
        """
        requested_at = self._clock()
        async with open_channel(self._leaf(), target) as channel:
            stub = worker_pb2_grpc.WorkerStub(channel)
            try:
                reply = await stub.Snapshot(worker_pb2.SnapshotRequest(), timeout=SNAPSHOT_TIMEOUT_SECONDS)
            except grpc.aio.AioRpcError as error:
                if error.code() in NEVER:
                    raise CannotSnapshot(
                        "the worker's image cannot take a snapshot on request. A restart of the session takes one, and "
                        "updates the image"
                    ) from error
                raise Silent(f"{error.code().name}: {error.details()}") from error
        return max(requested_at, datetime.fromtimestamp(reply.last_snapshot_time, UTC))


def parse_reply(reply: worker_pb2.DescribeReply, pod_uid: str, received_at: datetime) -> WorkerReport:
    """Return the report in a message."""
    snapshot = reply.last_snapshot_time
    return WorkerReport(
        pod_uid=pod_uid,
        received_at=received_at,
        epoch=reply.epoch,
        adapters_used=reply.adapters_used,
        model_places=reply.model_places or reply.capabilities.adapter_slots,  # an earlier image cannot park models
        running_seconds=reply.running_seconds,
        snapshot_seconds=reply.snapshot_seconds,
        last_snapshot_time=datetime.fromtimestamp(snapshot, UTC) if snapshot else None,
        volume_full=reply.volume_full,
        idle_seconds=reply.idle_seconds,
        instance=reply.instance_id,
        models=tuple(ModelStep(model.model_id, model.optimizer_step) for model in reply.models),
        trained_tokens=reply.metrics.trained_tokens,
    )
