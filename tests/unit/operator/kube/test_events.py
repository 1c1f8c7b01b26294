from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, cast

import pytest
from support.operator.fake_cluster import FakeCluster
from support.simulated_time import simulated_time
from tinsmith_operator.api.training_session import parse_session
from tinsmith_operator.common.actions import Emit, EventType
from tinsmith_operator.errors import Refused, Unavailable
from tinsmith_operator.kube.events import FORGET_SECONDS, WARNINGS_SECONDS, Events, parse_warning

SESSION = parse_session(
    {
        "metadata": {"name": "tiny", "namespace": "tin", "uid": "u", "generation": 1, "resourceVersion": "3"},
        "spec": {"model": {"name": "m", "source": {"type": "Hub", "hub": {"repository": "a/b"}}}},
    }
)
AT = "2026-03-01T12:00:00Z"


@pytest.mark.parametrize(
    "times",
    [
        {"lastTimestamp": AT, "eventTime": None},
        {"lastTimestamp": None, "eventTime": "2026-03-01T12:00:00.000000Z"},
        {"eventTime": "2026-03-01T11:00:00.000000Z", "series": {"lastObservedTime": "2026-03-01T12:00:00.000000Z"}},
    ],
    ids=["of the old API", "of the new API", "a series of the new API"],
)
def test_a_warning_is_read_whichever_api_wrote_it(times: dict[str, Any]) -> None:
    event = {
        "metadata": {"creationTimestamp": "2026-03-01T10:00:00Z"},
        "involvedObject": {"kind": "Pod", "uid": "p"},
        "reason": "FailedMount",
        "message": "no such claim",
        **times,
    }
    warning = parse_warning(event)
    assert (warning.kind, warning.uid, warning.reason, warning.message) == ("Pod", "p", "FailedMount", "no such claim")
    assert warning.at == datetime(2026, 3, 1, 12, tzinfo=UTC)


@simulated_time
async def test_warnings_are_read_once_in_a_quarter_of_a_minute_however_often_they_are_wanted() -> None:
    cluster = FakeCluster()
    events = Events(cast(Any, cluster), "operator-0")
    for _ in range(100):
        await events.warnings(SESSION)
        await asyncio.sleep(0.5)
    assert len(cluster.requests) == 50 // WARNINGS_SECONDS + 1


@simulated_time
async def test_namespaces_that_come_and_go_leave_nothing() -> None:
    events = Events(cast(Any, FakeCluster()), "operator-0")
    for number in range(5):
        await events.warnings(replace(SESSION, namespace=f"run-{number}"))
        await asyncio.sleep(FORGET_SECONDS)
    assert list(events._read) == ["run-4"]


@simulated_time
async def test_warnings_that_cannot_be_read_are_the_last_ones_known() -> None:
    cluster = FakeCluster()
    cluster.failures["list"] = [Unavailable("the store of Events is down"), Refused("forbidden")]
    events = Events(cast(Any, cluster), "operator-0")
    assert await events.warnings(SESSION) == ()
    await asyncio.sleep(WARNINGS_SECONDS)
    assert await events.warnings(SESSION) == ()


async def test_an_event_that_is_refused_holds_nothing_up() -> None:
    cluster = FakeCluster()
    cluster.failures["create"] = [Refused("forbidden")]
    await Events(cast(Any, cluster), "operator-0").emit(SESSION, Emit(EventType.NORMAL, "Ready", "It is ready."))
    assert len(cluster.requests) == 1
