"""The writer of training progress over a cluster in memory and in simulated time."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any

import pytest
from support.operator.fake_cluster import FakeCluster, Manifest
from support.operator.operators import session_manifest
from support.simulated_time import now, simulated_time
from tinsmith_operator.common.observed import ModelStep, WorkerReport
from tinsmith_operator.errors import Conflict, NotFound, NotLeading, Refused, Unavailable
from tinsmith_operator.kube.cache import Cache
from tinsmith_operator.kube.resources import SESSIONS, Key, Ref, Resource
from tinsmith_operator.runtime.progress import REFUSED_SECONDS, ProgressWriter
from typing_extensions import override

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)


class Sessions(FakeCluster):
    """Sessions that one operator watches. `writes` are the times and names of the writes of progress."""

    def __init__(self) -> None:
        super().__init__()
        self.enqueued: list[Key] = []
        self.cache = Cache(self.enqueued.append)
        self.leads = True
        self.writes: list[tuple[float, str]] = []
        self.writer = ProgressWriter(self, self.cache, lambda: self.leads)  # type: ignore[arg-type]

    @override
    async def apply_progress(self, resource: Resource, manifest: Manifest) -> Manifest:
        self.writes.append((now(), manifest["metadata"]["name"]))
        await asyncio.sleep(0.01)
        return await super().apply_progress(resource, manifest)

    def add(self, name: str, **status: Any) -> Key:
        manifest = session_manifest(name)
        manifest["metadata"] |= {"namespace": "tin", "generation": 1}
        self.cache.note(self.put({**manifest, "status": status}))
        return Key("tin", name, SESSIONS.kind)

    def remove(self, key: Key) -> None:
        body = self.objects.pop(Ref(key.kind, key.namespace, key.name))
        self.cache.note_end(Ref(key.kind, key.namespace, key.name), body["metadata"]["uid"], 10**9)

    def report(self, key: Key, step: int, tokens: int = 0, idle_seconds: float = 0.0) -> None:
        models = (ModelStep(f"{key.name}:train:0", step),)
        at = NOON + timedelta(seconds=now())
        report = WorkerReport("pod", at, 1, 1, 8, 0.0, 0.0, None, False, idle_seconds, "1", models, tokens)
        self.writer.note(key, report)

    def step(self, key: Key) -> Any:
        return self.objects[Ref(key.kind, key.namespace, key.name)]["status"].get("progress", {}).get("step")

    @asynccontextmanager
    async def written(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.writer.run())
        try:
            yield
        finally:
            task.cancel()


@simulated_time
async def test_a_thousand_busy_sessions_take_turns_of_one_write_a_second_and_idle_ones_write_nothing() -> None:
    sessions = Sessions()
    busy = [sessions.add(f"busy-{number}") for number in range(1000)]
    idle = [sessions.add(f"idle-{number}") for number in range(100)]
    minutes = 35
    async with sessions.written():
        for minute in range(minutes):
            for key in busy:
                sessions.report(key, minute + 1, 6000 * minute)
            for key in idle:
                sessions.report(key, 0, idle_seconds=60.0 * minute + 5)
            await asyncio.sleep(60)
    times = [seconds for seconds, _ in sessions.writes]
    assert min(later - earlier for earlier, later in pairwise(times)) >= 1
    assert len(times) > 60 * minutes * 0.98
    names = [name for _, name in sessions.writes]
    assert set(names[:1000]) == {key.name for key in busy}
    assert names[1000:2000] == names[:1000]
    assert set(Counter(names).values()) == {2, 3}


@simulated_time
async def test_a_session_that_comes_to_rest_is_written_once_more() -> None:
    sessions = Sessions()
    key = sessions.add("tiny")
    async with sessions.written():
        for minute in range(10):
            trains = minute < 2
            sessions.report(key, 5, 6000 * min(minute, 1), idle_seconds=0.0 if trains else 60.0 * (minute - 1))
            await asyncio.sleep(60)
    assert [seconds for seconds, _ in sessions.writes] == [0, 60, 120]
    progress = sessions.objects[Ref(SESSIONS.kind, "tin", "tiny")]["status"]["progress"]
    assert (progress["tokensPerSecond"], progress["lastActivityTime"]) == (0, "2026-03-01T12:01:00Z")


@simulated_time
async def test_a_session_that_loses_its_worker_is_written_once_more_also_by_the_next_operator() -> None:
    sessions = Sessions()
    trained = {"models": 1, "step": 5, "tokensPerSecond": 100, "lastActivityTime": "2026-03-01T12:00:00Z"}
    key, unused = sessions.add("tiny", progress=trained), sessions.add("unused")
    async with sessions.written():
        for _ in range(3):
            sessions.writer.note_stopped(key)
            sessions.writer.note_stopped(unused)
            await asyncio.sleep(2)
    assert [name for _, name in sessions.writes] == ["tiny"]
    assert sessions.objects[Ref(SESSIONS.kind, "tin", "tiny")]["status"] == {
        "progress": {**trained, "tokensPerSecond": 0, "runs": []}
    }


@simulated_time
async def test_a_write_of_progress_causes_no_reconcile() -> None:
    sessions = Sessions()
    key = sessions.add("tiny", model="demo/tiny")
    sessions.enqueued.clear()
    async with sessions.written():
        sessions.report(key, 5)
        await asyncio.sleep(1)
    assert sessions.step(key) == 5
    assert sessions.enqueued == []
    assert not sessions.cache.note(sessions.objects[Ref(SESSIONS.kind, "tin", "tiny")])  # the event of the watch


@pytest.mark.parametrize("failure", [Conflict("changed"), NotFound("gone"), NotLeading("no lease"), ValueError()])
def test_a_write_that_fails_waits_for_the_next_report_and_delays_no_other(failure: Exception) -> None:
    @simulated_time
    async def live() -> None:
        sessions = Sessions()
        first, second = sessions.add("first"), sessions.add("second")
        sessions.failures = {"progress": [failure]}
        async with sessions.written():
            for step in (1, 2):
                sessions.report(first, step)
                sessions.report(second, step)
                await asyncio.sleep(60)
        assert [name for _, name in sessions.writes] == ["first", "second"] * 2
        assert (sessions.step(first), sessions.step(second)) == (2, 2)

    live()


@simulated_time
async def test_an_older_definition_that_refuses_progress_is_not_asked_every_second() -> None:
    sessions = Sessions()
    keys = [sessions.add(f"tiny-{number}") for number in range(10)]
    sessions.failures = {"progress": [Refused("field not declared in schema"), Unavailable("away")]}
    async with sessions.written():
        for key in keys:
            sessions.report(key, 1)
        await asyncio.sleep(REFUSED_SECONDS + 5)
    first, second, third = (seconds for seconds, _ in sessions.writes[:3])
    assert second - first >= REFUSED_SECONDS
    assert third - second < 2


@simulated_time
async def test_deleted_sessions_and_a_lost_lead_are_forgotten() -> None:
    sessions = Sessions()
    gone, again, stays = (sessions.add(name) for name in ("gone", "again", "stays"))
    for key in (gone, again, stays):
        sessions.report(key, 5)
    sessions.writer.forget(gone)
    sessions.remove(gone)
    sessions.remove(again)
    sessions.add("again")
    async with sessions.written():
        await asyncio.sleep(5)
        assert [name for _, name in sessions.writes] == ["stays"]
        sessions.leads = False
        sessions.writer.end()
        sessions.report(stays, 6)
        await asyncio.sleep(5)
        assert sessions.step(stays) == 5
        sessions.leads = True
        sessions.report(stays, 6)
        await asyncio.sleep(5)
        assert sessions.step(stays) == 6


@simulated_time
async def test_a_session_that_is_being_deleted_keeps_its_version() -> None:
    """Each change of the version would make the operator repeat the removal of the finalizer."""
    sessions = Sessions()
    key = sessions.add("tiny")
    body = sessions.objects[Ref(key.kind, key.namespace, key.name)]
    deleted = {**body, "metadata": {**body["metadata"], "deletionTimestamp": "2026-03-01T12:00:00Z"}}
    sessions.report(key, 5)
    sessions.cache.note(sessions.put(deleted))
    async with sessions.written():
        sessions.report(key, 6)
        await asyncio.sleep(5)
    assert sessions.writes == []
