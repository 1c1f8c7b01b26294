"""The picture of the sessions, put together from what the API tells in its own order."""

from __future__ import annotations

from typing import Any

from support.server.operator_stand_in import spec_of
from tinsmith_server.fleet.kubernetes.api import SESSIONS, KubernetesApi
from tinsmith_server.fleet.kubernetes.training_session import parse_session
from tinsmith_server.fleet.kubernetes.watching import Watch


def manifest(version: int, **status: str) -> dict[str, Any]:
    metadata = {"name": "tiny-1", "namespace": "team", "resourceVersion": str(version)}
    return {"metadata": metadata, "spec": spec_of(), "status": status}


async def test_the_answer_to_a_creation_does_not_undo_what_the_watch_has_told_since() -> None:
    watch = Watch(KubernetesApi(), SESSIONS, "team", parse_session, lambda: None)
    watch.note(manifest(1))
    assert watch.objects["team", "tiny-1"].worker_id is None
    watch._apply("MODIFIED", manifest(2, workerId="uid-1"))
    watch.note(manifest(1))
    assert watch.objects["team", "tiny-1"].worker_id == "uid-1"


async def test_every_change_is_told_and_an_object_that_is_not_understood_is_as_good_as_gone() -> None:
    changes: list[None] = []
    watch = Watch(KubernetesApi(), SESSIONS, None, parse_session, lambda: changes.append(None))
    watch._apply("ADDED", manifest(1))
    watch._apply("MODIFIED", {**manifest(2), "spec": {}})
    assert dict(watch.objects) == {}
    assert len(changes) == 2
    watch._apply("BOOKMARK", {"metadata": {"resourceVersion": "3"}})
    assert len(changes) == 2
