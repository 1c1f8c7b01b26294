"""Metrics for the server leave in the background, in bounded requests, and a failure ends no run."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest
import tinker
from tinsmith.training.errors import MetricsNotReported, NotOffered
from tinsmith.training.run_logs import server
from tinsmith.training.run_logs.server import POINTS_AT_ONCE, ServerLogger, points_of

pytestmark = pytest.mark.pytorch

CLIENT = cast("tinker.TrainingClient", SimpleNamespace(model_id="s:train:0"))


class Calls:
    """The requests, and the error that each of the next ones gets."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.errors: list[Exception] = []
        self.failed = threading.Event()

    def send(self, _client: object, method: str, address: str, body: dict[str, Any], **_: Any) -> None:
        assert (method, address) == ("POST", "/api/v1/training_runs/s:train:0/metrics")
        if self.errors:
            self.failed.set()
            raise self.errors.pop(0)
        self.bodies.append(body)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    calls = Calls()
    monkeypatch.setattr(server, "send", calls.send)
    monkeypatch.setattr(server, "TOGETHER_SECONDS", 0.05)
    return calls


def test_each_step_is_reported_once_in_requests_of_bounded_size(calls: Calls) -> None:
    log = ServerLogger(CLIENT, total_steps=250)
    for step in range(250):
        log.log_metrics({"loss": 1.0 / (step + 1), "word": "a"}, step)
    log.log_metrics({"of no step": 1.0})
    log.close()
    assert [point["step"] for body in calls.bodies for point in body["metrics"]] == list(range(250))
    assert all(len(body["metrics"]) <= POINTS_AT_ONCE and body["total_steps"] == 250 for body in calls.bodies)
    assert calls.bodies[0]["metrics"][0]["values"] == {"loss": 1.0}


def test_a_point_has_at_most_64_numbers_and_none_that_json_lacks() -> None:
    first, second = points_of({f"m{number}": number for number in range(70)} | {"nan": float("nan")}, 3, 0.0)
    assert (len(first["values"]), len(second["values"]), first["step"]) == (64, 6, 3)
    assert first["time"] == "1970-01-01T00:00:00Z"


def test_a_failed_request_is_told_once_and_made_again(calls: Calls) -> None:
    calls.errors.append(ConnectionError("no answer"))
    log = ServerLogger(CLIENT, None)
    log.log_metrics({"loss": 1.0}, 1)
    assert calls.failed.wait(10)
    while log._failure is None:
        pass
    with pytest.raises(MetricsNotReported, match="no answer"):
        log.log_metrics({"loss": 0.5}, 2)
    log.close()
    assert [point["step"] for body in calls.bodies for point in body["metrics"]] == [1, 2]


def test_points_that_replace_others_during_a_request_are_sent(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MOST_WAITING", 3)
    begun, may_end = threading.Event(), threading.Event()

    def slow(*arguments: Any, **more: Any) -> None:
        begun.set()
        assert may_end.wait(10)
        calls.send(*arguments, **more)

    monkeypatch.setattr(server, "send", slow)
    log = ServerLogger(CLIENT, None)
    log.log_metrics({"loss": 1.0}, 1)
    assert begun.wait(10)
    for step in range(2, 6):
        log.log_metrics({"loss": 1.0}, step)
    may_end.set()
    log.close()
    assert [point["step"] for body in calls.bodies for point in body["metrics"]] == [1, 3, 4, 5]


def test_refused_metrics_do_not_keep_later_ones_waiting(calls: Calls) -> None:
    calls.errors.append(MetricsNotReported("metrics[0].step is too large"))
    log = ServerLogger(CLIENT, None)
    log.log_metrics({"loss": 1.0}, 2**60)
    assert calls.failed.wait(10)
    while log._waiting:
        pass
    with pytest.raises(MetricsNotReported, match="too large"):
        log.log_metrics({"x" * 200: 0.5}, 2)
    log.close()
    assert [point["values"] for body in calls.bodies for point in body["metrics"]] == [{"x" * 128: 0.5}]


def test_a_run_that_ends_without_an_answer_says_how_much_is_missing(calls: Calls) -> None:
    calls.errors += [ConnectionError("no answer")] * 100
    log = ServerLogger(CLIENT, None)
    log.log_metrics({"loss": 1.0}, 1)
    with pytest.raises(MetricsNotReported, match="the metrics of 1 steps were not reported"):
        log.close()


def test_a_server_without_the_call_is_left_in_peace(calls: Calls) -> None:
    calls.errors.append(NotOffered("no such call"))
    log = ServerLogger(CLIENT, None)
    log.log_metrics({"loss": 1.0}, 1)
    log._thread.join(10)
    log.log_metrics({"loss": 1.0}, 2)
    log.close()
    assert calls.bodies == []
