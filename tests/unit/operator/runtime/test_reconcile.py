from __future__ import annotations

from typing import Any, cast

import pytest
from tinsmith_operator.api.base import Manifest
from tinsmith_operator.api.names import (
    MANAGED_BY_LABEL,
    MANAGER,
    RESTART_REQUEST_ANNOTATION,
    SNAPSHOT_REQUEST_ANNOTATION,
)
from tinsmith_operator.common.actions import Decision
from tinsmith_operator.kube.cache import Cache
from tinsmith_operator.kube.resources import POOLS, SESSIONS, Key
from tinsmith_operator.runtime.reconcile import Reconciler
from tinsmith_operator.runtime.workqueue import Precedence

KEY = Key("tin", "tiny", SESSIONS.kind)


class Steps:
    """A kind and an actor that say what was called, in order."""

    def __init__(self) -> None:
        self.taken: list[str] = []

    async def decide(self, key: Key, body: Manifest) -> tuple[Any, Decision]:
        self.taken.append("decide")
        return None, Decision(())

    async def act(self, owner: Any, actions: object) -> None:
        self.taken.append("act")

    def carried_out(self, key: Key, decision: Decision) -> None:
        self.taken.append("carried out")

    def forget(self, key: Key) -> None:
        self.taken.append("forget")


def requested_state_of(**metadata: Any) -> object:
    return Reconciler(cache_with(**metadata), cast(Any, None), {}).requested_state(KEY)


def cache_with(**metadata: Any) -> Cache:
    cache = Cache(lambda _: None)
    place = {"name": "tiny", "namespace": "tin", "uid": "u1", "generation": 1, "resourceVersion": "1"}
    cache.note({"apiVersion": SESSIONS.api_version, "kind": SESSIONS.kind, "metadata": {**place, **metadata}})
    return cache


async def test_other_sessions_learn_of_a_decision_only_after_its_status_is_written() -> None:
    """Told earlier, the next session could write that it has the turn while this one still says the same."""
    steps = Steps()
    await Reconciler(cache_with(), cast(Any, steps), {SESSIONS.kind: steps}).reconcile(KEY)
    assert steps.taken == ["decide", "act", "carried out"]


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
def test_a_change_of_the_spec_changes_the_requested_state(change: dict[str, Any]) -> None:
    assert requested_state_of(**change) != requested_state_of()


@pytest.mark.parametrize(
    "change",
    [{"resourceVersion": "2"}, {"annotations": {"example.com/seen": "yes"}}, {"labels": {"team": "a"}}],
    ids=["its status", "another annotation", "a label"],
)
def test_other_changes_of_a_session_request_nothing(change: dict[str, Any]) -> None:
    assert requested_state_of(**change) == requested_state_of()


def test_a_deleted_session_has_no_requested_state() -> None:
    assert Reconciler(Cache(lambda _: None), cast(Any, None), {}).requested_state(KEY) is None


CHILD = {"namespace": "tin", "uid": "u2", "resourceVersion": "2"}
SERVICE = {"apiVersion": "v1", "kind": "Service", "metadata": {**CHILD, "name": "tiny"}}
STATEFUL_SET = {"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": {**CHILD, "name": "tiny"}}
READY_POD = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {**CHILD, "name": "tiny-0"},
    "status": {"conditions": [{"type": "Ready", "status": "True"}]},
}


@pytest.mark.parametrize(
    ("children", "precedence"),
    [
        ([], Precedence.NEW),
        ([SERVICE], Precedence.ORDINARY),
        ([SERVICE, STATEFUL_SET], Precedence.STARTING),
        ([SERVICE, STATEFUL_SET, READY_POD], Precedence.FIRST_STATUS),
    ],
    ids=["new", "begun", "all its objects exist", "its pod is ready"],
)
def test_a_session_without_a_status_comes_first_only_while_its_objects_are_created(
    children: list[Manifest], precedence: Precedence
) -> None:
    cache = cache_with()
    for child in children:
        cache.note(child)
    assert Reconciler(cache, cast(Any, None), {}).precedence(KEY) is precedence


def test_a_pool_without_a_status_waits_as_soon_as_its_deployment_exists() -> None:
    cache = Cache(lambda _: None)
    for kind, name in ((POOLS.kind, "tiny"), ("Deployment", "tiny-sampler")):
        cache.note({"apiVersion": "v1", "kind": kind, "metadata": {**CHILD, "name": name}})
    reconciler, key = Reconciler(cache, cast(Any, None), {}), KEY._replace(kind=POOLS.kind)
    assert reconciler.precedence(key) is Precedence.STARTING
    deployment = {"apiVersion": "v1", "kind": "Deployment", "status": {"readyReplicas": 1}}
    metadata = {**CHILD, "name": "tiny-sampler", "resourceVersion": "3", "labels": {MANAGED_BY_LABEL: MANAGER}}
    cache.note({**deployment, "metadata": metadata})
    assert reconciler.precedence(key) is Precedence.FIRST_STATUS


def test_a_session_with_a_status_is_never_delayed() -> None:
    cache = cache_with()
    body = {"apiVersion": SESSIONS.api_version, "kind": SESSIONS.kind, "status": {"conditions": [{"type": "Ready"}]}}
    cache.note({**body, "metadata": {**CHILD, "name": "tiny", "uid": "u1", "resourceVersion": "9"}})
    assert Reconciler(cache, cast(Any, None), {}).precedence(KEY) is Precedence.ORDINARY
