"""What workers are asked over mutual TLS: how they do, about once a minute each, beside the reconciles; and snapshots.

Reports live in memory alone. A worker that does not answer has none; whether that matters is for `decide` to say.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime

import grpc
from tinsmith_rpc import worker_pb2, worker_pb2_grpc

from tinsmith_operator.api.names import worker_dns_name
from tinsmith_operator.ca.certificates import Leaf
from tinsmith_operator.common.observed import WorkerReport
from tinsmith_operator.errors import OperatorError
from tinsmith_operator.kube.resources import Key
from tinsmith_operator.logs import get_logger, outside_of_reconciles

DESCRIBE_TIMEOUT_SECONDS = 10.0
# It waits for the turn that runs.
SNAPSHOT_TIMEOUT_SECONDS = 600.0
# How a worker answers that does not know the call, or not from us.
NEVER = frozenset({grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.PERMISSION_DENIED})
# While somebody waits for an answer.
CLOSE_PERIOD_SECONDS = 3.0

log = get_logger(__name__)


@dataclass(frozen=True)
class Target:
    """A worker to ask: which pod it is, where it serves, and which worker its certificate must name."""

    pod_uid: str
    address: str
    worker_id: str


class Silent(Exception):
    """A worker did not answer."""


class CannotSnapshot(Exception):
    """The worker will never do it, as a sentence that says why, and what helps."""


Describe = Callable[[Target], Awaitable[WorkerReport]]
"""Raises Silent."""

TakeSnapshot = Callable[[Target], Awaitable[datetime]]
"""When everything was on disk. Raises Silent, and CannotSnapshot."""


class Workers:
    """Asks each worker that is followed, while this operator leads. `heard` is called with whose report is new."""

    def __init__(
        self,
        describe: Describe,
        period_seconds: float,
        heard: Callable[[Key], None],
        leads: Callable[[], bool] = lambda: True,
    ) -> None:
        self._describe = describe
        self._period_seconds = period_seconds
        self._heard = heard
        self._leads = leads
        self._followed: dict[Key, tuple[Target, float]] = {}
        self._polls: dict[Key, asyncio.Task[None]] = {}
        self._reports: dict[Key, WorkerReport] = {}

    def follow(self, key: Key, target: Target | None, *, closely: bool = False) -> None:
        """From now on this one is asked for that session, and nobody when None. The same one again changes nothing.

        closely: somebody waits for what it will say from now on; what it said before is forgotten.
        """
        period_seconds = min(CLOSE_PERIOD_SECONDS, self._period_seconds) if closely else self._period_seconds
        # A reconcile that began before the lead was lost must not begin to ask after it.
        wanted = (target, period_seconds) if target is not None and self._leads() else None
        if self._followed.get(key) == wanted:
            return
        self._stop(key)
        if closely:
            # The clock that dates reports, and the API server's, which dates deletions, need not agree.
            self._reports.pop(key, None)
        if wanted is not None:
            self._followed[key] = wanted
            self._polls[key] = asyncio.create_task(
                self._poll(key, *wanted), name=f"describe {key.name}", context=outside_of_reconciles()
            )

    def report(self, key: Key) -> WorkerReport | None:
        """The latest of the session's worker, if one was ever heard."""
        return self._reports.get(key)

    def forget(self, key: Key) -> None:
        self._stop(key)
        self._reports.pop(key, None)

    def end(self) -> None:
        """Somebody else asks now, and what was said before grows old."""
        for key in list(self._followed):
            self._stop(key)
        self._reports.clear()

    async def close(self) -> None:
        polls = list(self._polls.values())
        self.end()
        await asyncio.gather(*polls, return_exceptions=True)

    def _stop(self, key: Key) -> None:
        self._followed.pop(key, None)
        poll = self._polls.pop(key, None)
        if poll is not None:
            poll.cancel()

    async def _poll(self, key: Key, target: Target, period_seconds: float) -> None:
        while True:
            try:
                self._reports[key] = await self._describe(target)
            except (Silent, OperatorError) as error:
                log.info(
                    "worker did not answer",
                    namespace=key.namespace,
                    kind=key.kind,
                    name=key.name,
                    address=target.address,
                    error=str(error),
                )
            except Exception:
                # Nobody waits for this task: were it to end, the worker would seem to say the same for ever.
                log.exception("worker not asked", **key._asdict(), address=target.address)
            else:
                self._heard(key)
            await asyncio.sleep(period_seconds)


def open_channel(leaf: Leaf, target: Target) -> grpc.aio.Channel:
    """To this worker and no other, as the one that the leaf is for."""
    credentials = grpc.ssl_channel_credentials(leaf.authority, leaf.key, leaf.certificate)
    options = [
        ("grpc.ssl_target_name_override", worker_dns_name(target.worker_id)),
        ("grpc.enable_http_proxy", 0),
    ]
    return grpc.aio.secure_channel(target.address, credentials, options=options)


class GrpcDescriber:
    """Describe as gRPC, with the operator's own certificate, renewed by whoever gives the leaf."""

    def __init__(self, leaf: Callable[[], Leaf]) -> None:
        self._leaf = leaf

    async def __call__(self, target: Target) -> WorkerReport:
        async with open_channel(self._leaf(), target) as channel:
            stub = worker_pb2_grpc.WorkerStub(channel)
            try:
                reply = await stub.Describe(worker_pb2.DescribeRequest(), timeout=DESCRIBE_TIMEOUT_SECONDS)
            except grpc.aio.AioRpcError as error:
                raise Silent(f"{error.code().name}: {error.details()}") from error
        return parse_reply(reply, target.pod_uid, datetime.now(UTC))


class GrpcSnapshots:
    """Snapshot as gRPC, with the operator's own certificate."""

    def __init__(self, leaf: Callable[[], Leaf], clock: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        self._leaf = leaf
        self._clock = clock

    async def __call__(self, target: Target) -> datetime:
        """At least what the worker had accepted when it was asked is on disk, even where nothing had to be written."""
        asked_at = self._clock()
        async with open_channel(self._leaf(), target) as channel:
            stub = worker_pb2_grpc.WorkerStub(channel)
            try:
                reply = await stub.Snapshot(worker_pb2.SnapshotRequest(), timeout=SNAPSHOT_TIMEOUT_SECONDS)
            except grpc.aio.AioRpcError as error:
                if error.code() in NEVER:
                    raise CannotSnapshot(
                        "the worker's image is older than snapshots on request. A restart of the session takes one, "
                        "and brings the image of today"
                    ) from error
                raise Silent(f"{error.code().name}: {error.details()}") from error
        return max(asked_at, datetime.fromtimestamp(reply.last_snapshot_time, UTC))


def parse_reply(reply: worker_pb2.DescribeReply, pod_uid: str, received_at: datetime) -> WorkerReport:
    """The message as `decide` reads it."""
    snapshot = reply.last_snapshot_time
    return WorkerReport(
        pod_uid=pod_uid,
        received_at=received_at,
        epoch=reply.epoch,
        adapters_used=reply.adapters_used,
        model_places=reply.model_places or reply.capabilities.adapter_slots,  # an earlier image parks none
        running_seconds=reply.running_seconds,
        snapshot_seconds=reply.snapshot_seconds,
        last_snapshot_time=datetime.fromtimestamp(snapshot, UTC) if snapshot else None,
        volume_full=reply.volume_full,
    )
