"""One wake request ends one suspension, and a failed request is made again by the next caller."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import UTC, datetime

import pytest
from tinsmith_server.fleet.kubernetes import waking
from tinsmith_server.fleet.kubernetes.api import POOLS, SESSIONS, ApiUnavailable, Resource
from tinsmith_server.fleet.kubernetes.waking import Waker

FIRST, SECOND = datetime(2026, 1, 2, 3, tzinfo=UTC), datetime(2026, 1, 2, 4, tzinfo=UTC)


@dataclass(frozen=True)
class Asleep:
    suspended_at: datetime | None
    key: tuple[str, str] = ("team", "tiny")


class Kubernetes:
    def __init__(self) -> None:
        self.wanted: list[tuple[str, str]] = []
        self.fails = False

    async def want(self, resource: Resource, namespace: str, name: str, at: datetime) -> None:
        self.wanted.append((resource.kind, f"{namespace}/{name}"))
        if self.fails:
            raise ApiUnavailable("the API does not answer")


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_each_suspension_is_ended_by_one_request() -> None:
    kubernetes = Kubernetes()
    waker = Waker(kubernetes.want)
    for _ in range(3):
        waker.wake(SESSIONS, Asleep(FIRST))
    waker.wake(SESSIONS, Asleep(None))
    waker.wake(SESSIONS, Asleep(SECOND))
    waker.wake(POOLS, Asleep(FIRST))
    await settled()
    assert kubernetes.wanted == [
        ("TrainingSession", "team/tiny"),
        ("TrainingSession", "team/tiny"),
        ("SamplerPool", "team/tiny"),
    ]
    await waker.close()


async def test_a_request_that_failed_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waking, "RETRY_SECONDS", 0.0)
    kubernetes = Kubernetes()
    kubernetes.fails = True
    waker = Waker(kubernetes.want)
    waker.wake(SESSIONS, Asleep(FIRST))
    await settled()
    kubernetes.fails = False
    waker.wake(SESSIONS, Asleep(FIRST))
    await settled()
    assert len(kubernetes.wanted) == 2
    await waker.close()


async def test_each_new_model_begins_the_idle_time_anew() -> None:
    kubernetes = Kubernetes()
    waker = Waker(kubernetes.want)
    for _ in range(2):
        waker.note_use(SESSIONS, ("team", "tiny"))
    await settled()
    assert len(kubernetes.wanted) == 2
    await waker.close()
