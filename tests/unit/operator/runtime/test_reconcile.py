from __future__ import annotations

from typing import Any, cast

import pytest
from tinsmith_operator.api.names import RESTART_REQUEST_ANNOTATION, SNAPSHOT_REQUEST_ANNOTATION
from tinsmith_operator.kube.cache import Cache
from tinsmith_operator.kube.resources import SESSIONS, Key
from tinsmith_operator.runtime.reconcile import Reconciler

KEY = Key("tin", "tiny", SESSIONS.kind)


def asked_of(**metadata: Any) -> object:
    cache = Cache(lambda _: None)
    place = {"name": "tiny", "namespace": "tin", "uid": "u1", "generation": 1, "resourceVersion": "1"}
    cache.note({"apiVersion": SESSIONS.api_version, "kind": SESSIONS.kind, "metadata": {**place, **metadata}})
    return Reconciler(cache, cast(Any, None), {}).asked(KEY)


@pytest.mark.parametrize(
    "change",
    [
        {"generation": 2},
        {"deletionTimestamp": "2026-01-02T03:04:05Z"},
        {"uid": "of another one of its name"},
        {"annotations": {RESTART_REQUEST_ANNOTATION: "2026-01-02T03:04:05Z"}},
        {"annotations": {SNAPSHOT_REQUEST_ANNOTATION: "2026-01-02T03:04:05Z"}},
    ],
    ids=["its spec", "its deletion", "another session", "a restart", "a snapshot"],
)
def test_what_a_user_wants_of_a_session_is_something_else_then(change: dict[str, Any]) -> None:
    assert asked_of(**change) != asked_of()


@pytest.mark.parametrize(
    "change",
    [{"resourceVersion": "2"}, {"annotations": {"example.com/seen": "yes"}}, {"labels": {"team": "a"}}],
    ids=["its status", "another annotation", "a label"],
)
def test_what_is_written_on_a_session_beside_that_asks_for_nothing(change: dict[str, Any]) -> None:
    assert asked_of(**change) == asked_of()


def test_nothing_is_asked_of_a_session_that_is_gone() -> None:
    assert Reconciler(Cache(lambda _: None), cast(Any, None), {}).asked(KEY) is None
