"""The picture of the sessions, put together from what the API tells in its own order."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from support.server.operator_stand_in import spec_of
from tinsmith_server.fleet.kubernetes import watching
from tinsmith_server.fleet.kubernetes.api import SESSIONS, ApiUnavailable, HistoryGone, KubernetesApi
from tinsmith_server.fleet.kubernetes.training_session import parse_session
from tinsmith_server.fleet.kubernetes.watching import Watch


def manifest(version: int, **status: str) -> dict[str, Any]:
    metadata = {"name": "tiny-1", "namespace": "team", "resourceVersion": str(version)}
    return {"metadata": metadata, "spec": spec_of(), "status": status}


async def test_the_answer_to_a_creation_does_not_revert_later_watch_events() -> None:
    watch = Watch(KubernetesApi(), SESSIONS, "team", parse_session, lambda: None)
    watch.note(manifest(1))
    assert watch.objects["team", "tiny-1"].worker_id is None
    watch._apply("MODIFIED", manifest(2, workerId="uid-1"))
    watch.note(manifest(1))
    assert watch.objects["team", "tiny-1"].worker_id == "uid-1"


async def test_an_object_deleted_before_the_answer_to_its_creation_does_not_reappear() -> None:
    """A stale object would count as a starting session, and no other would be created for its model."""
    watch = Watch(Lists(), SESSIONS, "team", parse_session, lambda: None)
    watch._apply("ADDED", manifest(1))
    watch._apply("DELETED", manifest(2))
    watch.note(manifest(1))
    assert dict(watch.objects) == {}
    watch.note(manifest(3))
    assert list(watch.objects) == [("team", "tiny-1")]
    await watch.refresh()
    watch._apply("DELETED", manifest(9))
    await watch.close()
    watch.note(manifest(4))
    assert dict(watch.objects) == {}


class Lists(KubernetesApi):
    """An API whose lists say the same, in a newer version."""

    version = 3

    async def list(self, _resource: object, _namespace: object) -> Any:
        self.version += 1
        return [manifest(self.version, workerId="uid-1")], str(self.version)


async def test_a_change_of_an_unread_field_has_no_effect() -> None:
    """A busy session has its status written once a minute, and each change wakes all held polls."""
    changes: list[None] = []
    watch = Watch(Lists(), SESSIONS, "team", parse_session, lambda: changes.append(None))
    watch._apply("ADDED", manifest(1, workerId="uid-1"))
    watch._apply("MODIFIED", manifest(2, workerId="uid-1", lastSnapshotTime="2026-11-27T02:00:00Z"))
    assert await watch.refresh() is False
    assert len(changes) == 1
    watch._apply("MODIFIED", manifest(9, workerId="uid-2"))
    assert await watch.refresh() is True
    assert len(changes) == 3
    await watch.close()


async def test_every_change_is_reported_and_an_unreadable_object_counts_as_deleted() -> None:
    changes: list[None] = []
    watch = Watch(KubernetesApi(), SESSIONS, None, parse_session, lambda: changes.append(None))
    watch._apply("ADDED", manifest(1))
    watch._apply("MODIFIED", {**manifest(2), "spec": {}})
    assert dict(watch.objects) == {}
    assert len(changes) == 2
    watch._apply("BOOKMARK", {"metadata": {"resourceVersion": "3"}})
    assert len(changes) == 2


class Watches(Lists):
    """An API that ends watches in a given way. It records the version from which each watch began."""

    def __init__(self, *ends: Exception | None) -> None:
        super().__init__()
        self.ends, self.began_at = list(ends), []
        self.are_over = asyncio.Event()

    async def watch(self, _resource: object, _namespace: object, version: str) -> Any:
        self.began_at.append(version)
        if not self.ends:
            self.are_over.set()
            await asyncio.Event().wait()
        yield "BOOKMARK", {"metadata": {"resourceVersion": str(int(version) + 10)}}
        if (end := self.ends.pop(0)) is not None:
            raise end


@pytest.mark.parametrize(
    ("end", "next_version"),
    [(None, "14"), (HistoryGone("too old"), "5"), (ApiUnavailable("down"), "5"), (KeyError("metadata"), "5")],
    ids=["in-time", "history", "outage", "bug"],
)
async def test_a_watch_that_ends_by_itself_continues_and_any_other_starts_with_a_list(
    end: Exception | None, next_version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a list shows the deletions that a broken watch missed."""
    monkeypatch.setattr(watching, "FIRST_BACKOFF_SECONDS", 0.0)
    api = Watches(end)
    watch = Watch(api, SESSIONS, "team", parse_session, lambda: None)
    await watch.refresh()
    await asyncio.wait_for(api.are_over.wait(), 5)
    await watch.close()
    assert api.began_at == ["4", next_version]
