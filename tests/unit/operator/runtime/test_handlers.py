"""Kopf's settings and handlers. tests/cluster/operator shows their effect on objects."""

from __future__ import annotations

import asyncio
import itertools
import re
import tomllib
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import tinsmith_operator.runtime.handlers as doors
from packaging.specifiers import SpecifierSet
from tinsmith_operator.installation import Scope
from tinsmith_operator.kube.connection import WatchSession
from tinsmith_operator.kube.resources import WATCHED
from tinsmith_operator.runtime.handlers import (
    LONGEST_BACKOFF_SECONDS,
    EndlessBackoff,
    Watch,
    watch_settings,
)

PACKAGE = Path(doors.__file__).parents[1]


def test_only_event_handlers_are_registered_so_kopf_writes_to_no_object() -> None:
    sources = "\n".join(file.read_text() for file in PACKAGE.rglob("*.py"))
    assert set(re.findall(r"kopf\.on\.(\w+)", sources)) == {"event", "login"}
    assert "@kopf" not in sources


def test_kopf_neither_scans_nor_posts_nor_kills() -> None:
    settings = watch_settings()
    assert settings.scanning.disabled
    assert not settings.posting.enabled
    assert settings.process.ultimate_exiting_timeout is None
    assert settings.persistence.finalizer != type(settings.persistence)().finalizer


def test_no_kopf_is_asked_for_that_cannot_leave_the_filtering_to_the_api_server() -> None:
    """1.44 has no label selectors, and would bring every Secret and pod of the cluster into memory."""
    project = tomllib.loads((PACKAGE.parents[1] / "pyproject.toml").read_text())["project"]
    [kopf] = [each for each in project["optional-dependencies"]["operator"] if each.startswith("kopf")]
    assert not SpecifierSet(kopf.removeprefix("kopf")).contains("1.44.6")
    assert len(list(watch_settings().watching.label_selectors)) == 3, "Jobs, Secrets and pods"


def test_requests_to_an_unreachable_api_server_are_retried_without_a_limit() -> None:
    backoff = EndlessBackoff()
    first, again = (list(itertools.islice(backoff, 1000)) for _ in range(2))
    assert first == again, "each request begins anew"
    assert first[0] == 1
    assert max(first) == LONGEST_BACKOFF_SECONDS


async def no_turn() -> None:
    """Return at once: nothing else uses the rate limit."""


async def test_a_session_that_kopf_was_stopped_from_taking_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[WatchSession] = []

    async def open_session(*_: Any) -> WatchSession:
        opened.append(WatchSession("https://cluster", aiohttp.ClientSession(), None))
        return opened[-1]

    async def spawn_tasks(*, registry: Any, **_: Any) -> list[asyncio.Task[Any]]:
        [login] = registry._activities.get_all_handlers()
        return [asyncio.create_task(login.fn())]

    async def run_tasks(*_: Any, **__: Any) -> None:
        """Return as after a stop, without closing the login's session."""

    monkeypatch.setattr(doors, "open_watch_session", open_session)
    monkeypatch.setattr(doors.kopf, "spawn_tasks", spawn_tasks)
    monkeypatch.setattr(doors.kopf, "run_tasks", run_tasks)
    watch = Watch(Scope(("team",)), lambda *_: None, lambda *_: None, lambda *_: None, no_turn, WATCHED)
    await watch.run()
    await watch.stop()
    assert [session.http.closed for session in opened] == [True]
