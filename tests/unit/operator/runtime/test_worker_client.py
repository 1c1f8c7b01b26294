from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import grpc
import pytest
from support.server.fake_worker import FakeWorker
from support.simulated_time import now, simulated_time
from tinsmith_operator.api.names import worker_dns_name
from tinsmith_operator.ca.certificates import API_SERVER_NAME, OPERATOR_NAME, Authority, Leaf, Use, new_authority
from tinsmith_operator.common.observed import WorkerReport
from tinsmith_operator.errors import OperatorError
from tinsmith_operator.kube.resources import Key
from tinsmith_operator.runtime import worker_client
from tinsmith_operator.runtime.worker_client import (
    CALLS_AT_ONCE,
    CannotSnapshot,
    GrpcDescriber,
    GrpcSnapshots,
    Reports,
    Silent,
    Target,
    parse_reply,
)
from tinsmith_rpc import worker_pb2, worker_pb2_grpc
from typing_extensions import override

KEY = Key("tin", "tiny", "TrainingSession")
TARGET = Target("pod-1", "tiny.tin.svc:7443", "claim-1")
PERIOD_SECONDS = 60


def report_of(target: Target, **fields: Any) -> WorkerReport:
    reply = worker_pb2.DescribeReply(**{"epoch": 7, "adapters_used": 3, **fields})
    return parse_reply(reply, target.pod_uid, datetime.now(UTC))


class RecordingWorkers:
    """Answers like the worker of each target, and remembers who was asked when."""

    def __init__(self) -> None:
        self.calls: list[tuple[float, str]] = []
        self.notified: list[Key] = []
        self.silent = False
        self.seconds = 0.0
        self.leads = True
        self.fields: dict[str, Any] = {}
        self.noted: list[tuple[Key, WorkerReport]] = []
        self.reports = Reports(
            self.describe,
            PERIOD_SECONDS,
            self.notified.append,
            lambda: self.leads,
            lambda key, report: self.noted.append((key, report)),
        )

    async def describe(self, target: Target) -> WorkerReport:
        self.calls.append((now(), target.pod_uid))
        await asyncio.sleep(self.seconds)
        if self.silent:
            raise Silent("UNAVAILABLE")
        return report_of(target, **self.fields)


@simulated_time
async def test_a_worker_is_asked_at_once_and_then_once_a_minute_however_often_it_is_followed() -> None:
    workers = RecordingWorkers()
    for _ in range(150):
        workers.reports.follow(KEY, TARGET)
        await asyncio.sleep(1)
    assert workers.calls == [(0, "pod-1"), (60, "pod-1"), (120, "pod-1")]
    report = workers.reports.answer(KEY)
    assert report is not None
    assert (report.pod_uid, report.epoch, report.adapters_used) == ("pod-1", 7, 3)
    await workers.reports.close()


@simulated_time
async def test_only_so_many_workers_are_called_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []

    @asynccontextmanager
    async def open_channel(leaf: Leaf, target: Target) -> AsyncIterator[grpc.aio.Channel]:
        opened.append(target)
        await asyncio.sleep(1)
        raise Silent("UNAVAILABLE")
        yield

    monkeypatch.setattr(worker_client, "open_channel", open_channel)
    describe = GrpcDescriber(lambda: Leaf(b"", b"", b"", datetime.now(UTC)))
    calls = [asyncio.create_task(describe(TARGET)) for _ in range(CALLS_AT_ONCE + 1)]
    await asyncio.sleep(0.5)
    assert len(opened) == CALLS_AT_ONCE
    await asyncio.gather(*calls, return_exceptions=True)
    assert len(opened) == CALLS_AT_ONCE + 1


@simulated_time
async def test_a_session_is_reconciled_only_after_a_report_that_differs() -> None:
    workers = RecordingWorkers()
    workers.reports.follow(KEY, TARGET)
    for minute in range(10):
        progress = {"models": [worker_pb2.ModelStatus(model_id="a", optimizer_step=minute)]}
        workers.fields = {"idle_seconds": 60.0 * minute, "adapters_used": 4 if minute > 5 else 3, **progress}
        await asyncio.sleep(PERIOD_SECONDS)
    assert (len(workers.calls), len(workers.notified)) == (10, 2)
    assert [report.models for _, report in workers.noted] == [(("a", minute),) for minute in range(10)]
    await workers.reports.close()


@simulated_time
async def test_each_report_of_a_worker_that_computes_counts_because_it_may_hang() -> None:
    workers = RecordingWorkers()
    workers.fields = {"running_seconds": 5.0}
    workers.reports.follow(KEY, TARGET)
    await asyncio.sleep(2.5 * PERIOD_SECONDS)
    assert workers.notified == [KEY] * 3
    await workers.reports.close()


@simulated_time
async def test_each_report_counts_where_an_idle_policy_waits_for_it() -> None:
    workers = RecordingWorkers()
    workers.reports.follow(KEY, TARGET, at_most_seconds=PERIOD_SECONDS)
    await asyncio.sleep(2.5 * PERIOD_SECONDS)
    assert workers.notified == [KEY] * 3
    await workers.reports.close()


@simulated_time
async def test_no_worker_is_asked_once_the_lead_is_lost_and_all_are_when_it_is_back() -> None:
    workers = RecordingWorkers()
    workers.seconds = 5
    workers.reports.follow(KEY, TARGET)
    await asyncio.sleep(62)
    workers.leads = False
    workers.reports.end()
    workers.reports.follow(KEY, TARGET)  # by a reconcile that was under way
    await asyncio.sleep(200)
    assert (workers.calls, workers.notified) == ([(0, "pod-1")], [KEY])
    assert workers.reports.answer(KEY) is None
    workers.leads = True
    workers.reports.follow(KEY, TARGET)
    await asyncio.sleep(6)
    assert workers.calls == [(0, "pod-1"), (262, "pod-1")]
    await workers.reports.close()


@simulated_time
async def test_a_worker_with_a_waiting_caller_is_asked_at_once_and_then_every_few_seconds() -> None:
    workers = RecordingWorkers()
    workers.reports.follow(KEY, TARGET)
    await asyncio.sleep(7)
    for _ in range(8):
        workers.reports.follow(KEY, TARGET, closely=True)
        await asyncio.sleep(1)
    workers.reports.follow(KEY, TARGET)
    await asyncio.sleep(30)
    assert [seconds for seconds, _ in workers.calls] == [0, 7, 10, 13, 15]
    await workers.reports.close()


@simulated_time
async def test_asking_never_makes_the_follower_wait() -> None:
    workers = RecordingWorkers()
    workers.seconds = 1000
    workers.reports.follow(KEY, TARGET)
    assert now() == 0
    assert workers.reports.answer(KEY) is None
    await workers.reports.close()


@simulated_time
async def test_a_silent_worker_is_called_again_and_its_last_message_is_kept() -> None:
    workers = RecordingWorkers()
    workers.reports.follow(KEY, TARGET)
    await asyncio.sleep(1)
    workers.silent = True
    await asyncio.sleep(200)
    assert len(workers.calls) == 4
    assert workers.notified == [KEY]
    assert workers.reports.answer(KEY) is not None
    await workers.reports.close()


@simulated_time
async def test_a_worker_that_cannot_be_reached_is_called_again() -> None:
    workers = RecordingWorkers()
    failures: list[Exception] = [ValueError("a bug"), OperatorError("no authority yet")]

    async def describe(target: Target) -> WorkerReport:
        if failures:
            raise failures.pop()
        return await workers.describe(target)

    reports = Reports(describe, PERIOD_SECONDS, workers.notified.append)
    reports.follow(KEY, TARGET)
    await asyncio.sleep(2 * PERIOD_SECONDS + 1)
    assert workers.notified == [KEY]
    await reports.close()


@simulated_time
async def test_a_waiter_for_an_answer_never_gets_an_older_one() -> None:
    """Dates cannot decide it: the clocks of operator and API server may differ."""
    workers = RecordingWorkers()
    workers.reports.follow(KEY, TARGET)
    await asyncio.sleep(1)
    assert workers.reports.answer(KEY) is not None
    workers.reports.follow(KEY, TARGET, closely=True)
    assert workers.reports.answer(KEY) is None
    await asyncio.sleep(1)
    assert workers.reports.answer(KEY) is not None
    await workers.reports.close()


@simulated_time
async def test_another_pod_is_called_instead_of_its_predecessor() -> None:
    workers = RecordingWorkers()
    workers.reports.follow(KEY, TARGET)
    await asyncio.sleep(10)
    workers.reports.follow(KEY, Target("pod-2", TARGET.address, TARGET.worker_id))
    await asyncio.sleep(1)
    assert workers.calls == [(0, "pod-1"), (10, "pod-2")]
    await workers.reports.close()


@simulated_time
async def test_a_deleted_session_is_not_called_again() -> None:
    workers = RecordingWorkers()
    workers.reports.follow(KEY, TARGET)
    await asyncio.sleep(1)
    workers.reports.forget(KEY)
    await asyncio.sleep(1000)
    assert len(workers.calls) == 1
    assert workers.reports.answer(KEY) is None


def test_a_reply_is_read_with_its_units_and_absences() -> None:
    reply = worker_pb2.DescribeReply(
        epoch=4,
        adapters_used=2,
        running_seconds=12.5,
        snapshot_seconds=3.5,
        last_snapshot_time=1_700_000_000,
        volume_full=True,
        capabilities=worker_pb2.EngineCapabilities(adapter_slots=8),
        model_places=64,
        instance_id="process-1",
        models=[worker_pb2.ModelStatus(model_id="a", optimizer_step=3)],
        metrics=worker_pb2.WorkerMetrics(trained_tokens=5000),
    )
    at = datetime(2026, 3, 1, tzinfo=UTC)
    report = parse_reply(reply, "pod-1", at)
    assert (report.instance, report.models, report.trained_tokens) == ("process-1", (("a", 3),), 5000)
    assert report == WorkerReport(
        pod_uid="pod-1",
        received_at=at,
        epoch=4,
        adapters_used=2,
        model_places=64,
        running_seconds=12.5,
        snapshot_seconds=3.5,
        last_snapshot_time=datetime.fromtimestamp(1_700_000_000, UTC),
        volume_full=True,
    )
    assert parse_reply(worker_pb2.DescribeReply(), "pod-1", at).last_snapshot_time is None


def test_a_worker_of_an_image_that_parks_nothing_has_as_many_places_as_slots() -> None:
    reply = worker_pb2.DescribeReply(capabilities=worker_pb2.EngineCapabilities(adapter_slots=8))
    assert parse_reply(reply, "pod-1", datetime(2026, 3, 1, tzinfo=UTC)).model_places == 8


# ---- over a real connection


@pytest.fixture(scope="module")
def authority() -> Authority:
    return new_authority("tinsmith", datetime.now(UTC))


def leaf(authority: Authority, name: str, use: Use) -> Leaf:
    return authority.issue((name,), use, datetime.now(UTC))


class Savable(FakeWorker):
    """A worker that reports its last snapshot, or fails with a status code."""

    def __init__(self) -> None:
        super().__init__()
        self.last_snapshot_time = 0.0
        self.fails: grpc.StatusCode | None = None

    @override
    async def Snapshot(self, request: worker_pb2.SnapshotRequest, context: Any) -> worker_pb2.SnapshotReply:
        if self.fails is not None:
            await context.abort(self.fails, "not now")
        return worker_pb2.SnapshotReply(last_snapshot_time=self.last_snapshot_time)


@pytest.fixture
def worker() -> Savable:
    return Savable()


@pytest.fixture
async def address(authority: Authority, worker: Savable) -> AsyncIterator[str]:
    """Yield the address of this worker, with the identity `claim-1`; it requires client certificates."""
    mine = leaf(authority, worker_dns_name("claim-1"), Use.SERVER)
    credentials = grpc.ssl_server_credentials(
        [(mine.key, mine.certificate)], root_certificates=authority.pem, require_client_auth=True
    )
    server = grpc.aio.server()
    worker_pb2_grpc.add_WorkerServicer_to_server(worker, server)
    port = server.add_secure_port("127.0.0.1:0", credentials)
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(None)


async def test_a_worker_answers_the_operators_certificate(authority: Authority, address: str) -> None:
    describe = GrpcDescriber(lambda: leaf(authority, OPERATOR_NAME, Use.CLIENT))
    report = await describe(Target("pod-1", address, "claim-1"))
    assert report.pod_uid == "pod-1"


async def test_a_worker_that_is_not_the_expected_one_is_not_believed(authority: Authority, address: str) -> None:
    describe = GrpcDescriber(lambda: leaf(authority, OPERATOR_NAME, Use.CLIENT))
    with pytest.raises(Silent):
        await describe(Target("pod-1", address, "claim-2"))


async def test_a_worker_of_another_authority_is_not_believed(address: str) -> None:
    other = new_authority("other", datetime.now(UTC))
    describe = GrpcDescriber(lambda: leaf(other, API_SERVER_NAME, Use.CLIENT))
    with pytest.raises(Silent):
        await describe(Target("pod-1", address, "claim-1"))


NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)


def snapshots(authority: Authority) -> GrpcSnapshots:
    return GrpcSnapshots(lambda: leaf(authority, OPERATOR_NAME, Use.CLIENT), lambda: NOON)


@pytest.mark.parametrize(
    ("written", "expected"),
    [(0.0, NOON), ((NOON - timedelta(hours=1)).timestamp(), NOON), ((NOON + timedelta(seconds=2)).timestamp(), None)],
    ids=["never", "before: nothing had changed since", "now"],
)
async def test_a_snapshot_has_at_least_the_state_at_its_request(
    authority: Authority, worker: Savable, address: str, written: float, expected: datetime | None
) -> None:
    worker.last_snapshot_time = written
    assert await snapshots(authority)(Target("pod-1", address, "claim-1")) == (expected or NOON + timedelta(seconds=2))


@pytest.mark.parametrize("code", [grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.PERMISSION_DENIED], ids=str)
async def test_an_image_without_the_call_is_named_with_the_remedy(
    authority: Authority, worker: Savable, address: str, code: grpc.StatusCode
) -> None:
    worker.fails = code
    with pytest.raises(CannotSnapshot, match=r"image cannot take a snapshot on request.*restart"):
        await snapshots(authority)(Target("pod-1", address, "claim-1"))


@pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.FAILED_PRECONDITION], ids=str)
async def test_a_worker_that_cannot_snapshot_now_is_called_later(
    authority: Authority, worker: Savable, address: str, code: grpc.StatusCode
) -> None:
    worker.fails = code
    with pytest.raises(Silent, match="not now"):
        await snapshots(authority)(Target("pod-1", address, "claim-1"))
