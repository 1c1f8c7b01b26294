"""The same promises of one server, and of two that hear each other request; over fake workers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from support.server.fake_fleet import FakeFleet
from support.server.http_server import REPLICAS, TestedServer, recorded_answers, running_server, settings_for


@pytest.fixture
def fleet() -> Iterator[FakeFleet]:
    fleet = FakeFleet()
    yield fleet
    fleet.cleanup()


ONE, TWO = "one server", pytest.param("two in turn", marks=pytest.mark.slow("the same of two servers"))
ALSO_OF_TWO = {
    *("test_traps", "test_checkpoints", "test_copies", "test_models", "test_plain_http", "test_promotions"),
    *("test_recordings", "test_sessions"),
}
"""Modules about what one request leaves for the next one. What others promise ends with its request."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    chosen = any("server" in mark.args[0] for mark in metafunc.definition.iter_markers("parametrize"))
    if "server" in metafunc.fixturenames and not chosen and not hasattr(metafunc.module, "server"):
        name = metafunc.module.__name__.rpartition(".")[2]
        metafunc.parametrize("server", [ONE, TWO] if name in ALSO_OF_TWO else [ONE], indirect=True)


@pytest.fixture
async def server(request: pytest.FixtureRequest, tmp_path: Path, fleet: FakeFleet) -> AsyncIterator[TestedServer]:
    async with REPLICAS[request.param](settings_for(tmp_path), fleet) as server:
        yield server


@pytest.fixture
async def hasty_server(tmp_path: Path, fleet: FakeFleet) -> AsyncIterator[TestedServer]:
    """Return a server that holds polls for a moment only, for tests of what comes after the hold."""
    async with running_server(settings_for(tmp_path, poll_hold_seconds=0.1), fleet) as server:
        yield server


@pytest.fixture(autouse=True)
def _covers_the_routes_that_it_names(request: pytest.FixtureRequest) -> Iterator[None]:
    """Check that each route in a `core` mark has answered without an error."""
    with recorded_answers() as answers:
        yield
    for mark in request.node.iter_markers("core"):
        for subject in (subject for subject in mark.args if "/" in subject):
            method, path = subject.split(" ", maxsplit=1)
            answered = any(answer.is_of(method, path) for answer in answers)
            assert answered, f"the mark names {subject}, which did not answer"
