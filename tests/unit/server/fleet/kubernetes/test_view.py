"""Several namespaces as one picture: what one of them lacks is not the others' trouble."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from support.server.operator_stand_in import spec_of
from tinsmith_server.errors import StartupError
from tinsmith_server.fleet.kubernetes.api import (
    SESSIONS,
    ApiRefused,
    ApiUnavailable,
    KubernetesApi,
    KubernetesError,
    Resource,
)
from tinsmith_server.fleet.kubernetes.training_session import TrainingSession, parse_session
from tinsmith_server.fleet.kubernetes.watching import Scope, View, Watch
from typing_extensions import override

FORBIDDEN = ApiRefused("trainingsessions is forbidden")


class ScriptedApi(KubernetesApi):
    """Each namespace has one session, or an error. Its watches hear nothing."""

    def __init__(self, lists: dict[str | None, KubernetesError | None]) -> None:
        super().__init__()
        self.lists = lists

    @override
    async def list(self, resource: Resource, namespace: str | None) -> tuple[list[dict[str, Any]], str]:
        error = self.lists[namespace]
        if error is not None:
            raise error
        metadata = {"name": "tiny", "namespace": namespace or "any", "resourceVersion": "1"}
        return [{"metadata": metadata, "spec": spec_of()}], "1"

    @override
    async def watch(
        self, resource: Resource, namespace: str | None, version: str
    ) -> AsyncGenerator[tuple[str, dict[str, Any]], None]:
        await asyncio.Event().wait()
        yield "BOOKMARK", {}


def view_of(api: KubernetesApi, *namespaces: str) -> View[TrainingSession]:
    return View(api, SESSIONS, Scope(namespaces or None, None), parse_session, lambda: None)


def silence(watch: Watch[TrainingSession], trouble: KubernetesError) -> None:
    """Keep the watch silent for hours, for this reason."""
    watch._updated_at = -1e9
    watch._note_failure(trouble)


async def test_permitted_namespaces_are_read_even_if_another_one_is_refused() -> None:
    view = view_of(ScriptedApi({"a": None, "b": FORBIDDEN}), "a", "b")
    await view.open()
    assert set(view.objects) == {("a", "tiny")}
    await view.close()


async def test_a_server_that_is_refused_everywhere_does_not_start() -> None:
    view = view_of(ScriptedApi({"a": FORBIDDEN, "b": FORBIDDEN}), "a", "b")
    with pytest.raises(StartupError, match=r"of namespace a cannot be read: .*check that the CRD of TrainingSession"):
        await view.open()
    await view.close()


async def test_an_unreachable_namespace_is_a_problem_and_a_forbidden_one_is_not() -> None:
    view = view_of(ScriptedApi({"a": None, "b": None, "c": None}), "a", "b", "c")
    await view.open()
    taken_away, lost, _ = view.watches
    assert view.problem is None
    silence(taken_away, FORBIDDEN)
    assert view.problem is None
    silence(lost, ApiUnavailable("the network is down"))
    assert view.problem == "the TrainingSessions of namespace b cannot be read: the network is down"
    await view.close()


async def test_a_right_that_was_taken_away_is_a_problem_where_nothing_else_is_left() -> None:
    view = view_of(ScriptedApi({"a": None}), "a")
    await view.open()
    silence(view.watches[0], FORBIDDEN)
    assert view.problem == f"the TrainingSessions of namespace a cannot be read: {FORBIDDEN}"
    await view.close()
