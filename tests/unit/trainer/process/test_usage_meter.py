"""Counts of who used what."""

from __future__ import annotations

from tinsmith_rpc import worker_pb2
from tinsmith_trainer.process.usage_meter import HOUR_SECONDS, UsageMeter

TRAINED = worker_pb2.TRAINING_TOKENS


def meter(now: float = 2 * HOUR_SECONDS + 17) -> UsageMeter:
    return UsageMeter(most_rows=2, clock=lambda: now)


def test_usage_that_is_not_collected_is_bounded_in_memory_and_loses_no_token() -> None:
    counted = meter()
    for number in range(1000):
        counted.add(f"session-{number}", "alice", TRAINED, 1)
    usage = counted.take().usage
    assert {row.used_by: row.amount for row in usage} == {"session-0": 1, "session-1": 1, "": 998}
