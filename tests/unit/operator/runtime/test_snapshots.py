from __future__ import annotations

import asyncio
from datetime import UTC, datetime

from support.simulated_time import now, simulated_time
from tinsmith_operator.errors import OperatorError
from tinsmith_operator.kube.resources import Key
from tinsmith_operator.runtime.worker_client import SNAPSHOT_RETRY_SECONDS, CannotSnapshot, Silent, Snapshots, Target

KEY = Key("tin", "tiny", "TrainingSession")
TARGET = Target("pod-1", "tiny.tin.svc:7443", "claim-1")
NEXT = Target("pod-2", "tiny.tin.svc:7443", "claim-1")
FIRST, SECOND = "2026-02-01T12:00:00Z", "2026-02-01T13:00:00Z"
AT = datetime(2026, 2, 1, 12, 0, 3, tzinfo=UTC)


class Worker:
    """Takes its time for a snapshot. failures: what the next ones end with instead."""

    def __init__(self, *failures: Exception, seconds: float = 10.0) -> None:
        self.requests: list[tuple[float, str]] = []
        self.failures = list(failures)
        self.seconds = seconds
        self.notified: list[Key] = []
        self.leads = True
        self.snapshots = Snapshots(self.take, self.notified.append, lambda: self.leads)

    async def take(self, target: Target) -> datetime:
        self.requests.append((now(), target.pod_uid))
        await asyncio.sleep(self.seconds)
        if self.failures:
            raise self.failures.pop(0)
        return AT


@simulated_time
async def test_a_request_is_made_once_however_often_it_is_wanted() -> None:
    worker = Worker()
    for _ in range(100):
        worker.snapshots.request(KEY, TARGET, FIRST)
        await asyncio.sleep(1)
    assert worker.requests == [(0, "pod-1")]
    assert worker.notified == [KEY]
    answer = worker.snapshots.answer(KEY)
    assert answer is not None
    assert (answer.request, answer.at, answer.problem) == (FIRST, AT, None)


@simulated_time
async def test_another_request_is_made_anew() -> None:
    worker = Worker()
    worker.snapshots.request(KEY, TARGET, FIRST)
    await asyncio.sleep(20)
    worker.snapshots.request(KEY, TARGET, None)
    worker.snapshots.request(KEY, TARGET, SECOND)
    await asyncio.sleep(20)
    answer = worker.snapshots.answer(KEY)
    assert answer is not None
    assert answer.request == SECOND
    assert len(worker.requests) == 2


@simulated_time
async def test_a_snapshot_is_requested_until_the_worker_answers() -> None:
    worker = Worker(Silent("UNAVAILABLE"), OperatorError("no authority yet"), ValueError("a bug"), seconds=0)
    worker.snapshots.request(KEY, TARGET, FIRST)
    await asyncio.sleep(2.5 * SNAPSHOT_RETRY_SECONDS)
    assert worker.snapshots.answer(KEY) is None
    await asyncio.sleep(SNAPSHOT_RETRY_SECONDS)
    assert worker.snapshots.answer(KEY) is not None
    assert [at for at, _ in worker.requests] == [SNAPSHOT_RETRY_SECONDS * number for number in range(4)]


@simulated_time
async def test_a_worker_that_never_can_is_asked_once_and_its_reason_is_the_answer() -> None:
    worker = Worker(CannotSnapshot("it is too old"))
    worker.snapshots.request(KEY, TARGET, FIRST)
    await asyncio.sleep(1000)
    answer = worker.snapshots.answer(KEY)
    assert answer is not None
    assert (answer.at, answer.problem) == (None, "it is too old")
    assert len(worker.requests) == 1


@simulated_time
async def test_the_worker_of_the_next_pod_is_asked_where_the_first_went_without_an_answer() -> None:
    worker = Worker()
    worker.snapshots.request(KEY, TARGET, FIRST)
    await asyncio.sleep(3)
    worker.snapshots.request(KEY, None, FIRST)
    await asyncio.sleep(30)
    assert worker.snapshots.answer(KEY) is None
    worker.snapshots.request(KEY, NEXT, FIRST)
    await asyncio.sleep(30)
    assert worker.snapshots.answer(KEY) is not None
    assert [pod for _, pod in worker.requests] == ["pod-1", "pod-2"]


@simulated_time
async def test_a_session_that_is_gone_is_forgotten() -> None:
    worker = Worker()
    worker.snapshots.request(KEY, TARGET, FIRST)
    await asyncio.sleep(20)
    worker.snapshots.forget(KEY)
    assert worker.snapshots.answer(KEY) is None
    worker.snapshots.request(KEY, TARGET, SECOND)
    await worker.snapshots.close()
    await asyncio.sleep(100)
    assert worker.snapshots.answer(KEY) is None


@simulated_time
async def test_a_former_leader_requests_no_snapshot_and_gets_no_notification() -> None:
    worker = Worker(Silent("away"), seconds=1.0)
    worker.snapshots.request(KEY, TARGET, FIRST)
    await asyncio.sleep(2)
    worker.leads = False
    worker.snapshots.end()
    worker.snapshots.request(KEY, TARGET, FIRST)  # by a reconcile that was under way
    await asyncio.sleep(10 * SNAPSHOT_RETRY_SECONDS)
    assert (worker.requests, worker.notified) == ([(0, "pod-1")], [])
    worker.leads = True
    worker.snapshots.request(KEY, TARGET, FIRST)
    await asyncio.sleep(2)
    assert worker.notified == [KEY]
