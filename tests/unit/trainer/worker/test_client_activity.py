"""A process is idle from the end of the last call for a client, and never while it works."""

from __future__ import annotations

from tinsmith_rpc import worker_pb2_grpc
from tinsmith_trainer.worker.client_activity import NOT_FOR_A_CLIENT, SERVICE, ClientActivity


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_idle_time_begins_with_the_end_of_the_last_call() -> None:
    clock = Clock()
    activity = ClientActivity(clock)
    clock.now += 5
    assert activity.idle_seconds(works=False) == 5
    with activity.use():
        clock.now += 60
        assert activity.idle_seconds(works=False) == 0
    clock.now += 7
    assert activity.idle_seconds(works=False) == 7


def test_the_idle_time_begins_with_the_end_of_work() -> None:
    clock = Clock()
    activity = ClientActivity(clock)
    clock.now += 60
    assert activity.idle_seconds(works=True) == 0
    clock.now += 3
    assert activity.idle_seconds(works=False) == 3


def test_each_call_that_is_not_for_a_client_is_a_call_of_the_service() -> None:
    calls = {f"{SERVICE}/{name}" for name in vars(worker_pb2_grpc.WorkerServicer) if not name.startswith("_")}
    assert calls > NOT_FOR_A_CLIENT
