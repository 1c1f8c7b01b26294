"""A tenant's quotas and their usage."""

from __future__ import annotations

import asyncio

import pytest
from tinsmith_rpc import worker_pb2
from tinsmith_server.errors import TooBusy, TooManySamples
from tinsmith_server.services.accounts import quotas
from tinsmith_server.services.accounts.quotas import QueueQuota, SamplesInFlight


def limit_of(most: int) -> quotas.Most:
    async def limit(_tenant: str) -> int:
        return most

    return limit


def described(**queued: int) -> list[worker_pb2.DescribeReply]:
    models = [worker_pb2.ModelStatus(model_id=model_id, queued=count) for model_id, count in queued.items()]
    return [worker_pb2.DescribeReply(models=models)]


async def test_operations_count_from_their_submission_until_a_worker_says_that_they_are_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(quotas, "PATIENCE_SECONDS", 0.01)
    queued = QueueQuota(limit_of(2))
    for number in (1, 2):
        await queued.admit("a", "m", number)
        queued.note("a", "m", number)
    with pytest.raises(TooBusy, match="2 of your operations are queued, and the limit is 2"):
        await queued.admit("a", "m", 3)
    await queued.admit("b", "other", 1)
    await queued.refresh(described(m=1, unheard_of=50))
    await queued.admit("a", "m", 3)


async def test_an_operation_that_fills_a_gap_is_admitted_because_later_ones_wait_for_it() -> None:
    queued = QueueQuota(limit_of(1))
    queued.note("a", "m", 5)
    await asyncio.wait_for(queued.admit("a", "m", 4), 1)


def test_samples_count_until_they_end_or_are_no_longer_polled() -> None:
    now = [1000.0]
    samples = SamplesInFlight(most=2, clock=lambda: now[0])
    for name in ("one", "two"):
        samples.admit("a")
        samples.record_poll("a", name)
    samples.admit("b")
    with pytest.raises(TooManySamples, match="2 of your samples are in flight, and the limit is 2"):
        samples.admit("a")
    samples.record_end("a", "one")
    samples.admit("a")
    samples.record_poll("a", "three")
    now[0] += 50
    samples.record_poll("a", "three")
    now[0] += 20
    samples.admit("a")
    samples.record_poll("a", "four")
    with pytest.raises(TooManySamples):
        samples.admit("a")
