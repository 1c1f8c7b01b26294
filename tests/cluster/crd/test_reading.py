"""The view of a TrainingSession for people and programs that read it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest
from cluster.crd.conftest import Kubectl, stored_with_status
from support.kubernetes.api_server import ApiServer
from support.kubernetes.fixtures import Cluster
from support.operator.resources import session_manifest
from support.operator.session_world import World
from tinsmith_operator.api.status import RunProgress, TrainingProgress, TrainingSessionStatus
from tinsmith_operator.session.progress import MOST_RUNS

PROGRESS = TrainingProgress(
    models=MOST_RUNS,
    step=120,
    tokens_per_second=5100,
    last_activity_time=datetime(2026, 3, 1, 12, tzinfo=UTC),
    runs=tuple(RunProgress(model=f"run-{number}:train:0", step=120 - number) for number in range(MOST_RUNS)),
).to_manifest()


@pytest.fixture(scope="module")
def ready_session(api_cluster: Cluster, api_server: ApiServer, definition: None) -> Iterator[Kubectl]:
    """kubectl in a namespace with one session, which tests only read."""
    world = World(session_manifest())
    world.settle()
    world.worker_reports(adapters_used=3)
    world.time_passes(timedelta(minutes=1))
    world.settle()
    manifest = session_manifest()
    manifest["metadata"] = {"name": "qwen"}
    assert world.session is not None
    status = {**world.session["status"], "progress": PROGRESS}
    with stored_with_status(api_cluster, api_server, manifest, status) as kubectl:
        yield kubectl


def cells(table: str) -> dict[str, str]:
    """Return the text in each column. A column without a value is empty."""
    header, row = table.rstrip("\n").splitlines()
    starts = [found.start() for found in re.finditer(r"\S+", header)]
    spans = zip(starts, [*starts[1:], None], strict=True)
    return {header[start:end].strip(): row[start:end].strip() for start, end in spans}


def test_a_status_comes_back_as_it_was_written(ready_session: Kubectl) -> None:
    status = json.loads(ready_session("get", "trainingsession", "qwen", "--output=json"))["status"]
    assert status.pop("progress") == PROGRESS
    parsed = TrainingSessionStatus.model_validate(status)
    assert parsed.to_manifest() == status
    assert parsed.adapters is not None


def test_a_list_of_sessions_shows_the_main_columns(ready_session: Kubectl) -> None:
    shown = cells(ready_session("get", "tsess"))
    assert shown.pop("AGE")
    assert shown == {
        "NAME": "qwen",
        "READY": "True",
        "REASON": "WorkerReady",
        "MODEL": "Qwen/Qwen3-8B",
        "ADAPTERS": "3/8",
        "STEP": "120",
        "TOKENS/S": "5100",
    }


def test_a_wide_list_shows_the_engine_the_node_and_the_image_too(ready_session: Kubectl) -> None:
    shown = cells(ready_session("get", "tsess", "--output=wide"))
    image = "tinsmith.local/tinsmith/trainer:0.1.0"
    assert (shown["ENGINE"], shown["NODE"], shown["IMAGE"]) == ("peft", "node-1", image)


def test_it_is_found_under_the_category(ready_session: Kubectl) -> None:
    assert "trainingsession.tinsmith.dev/qwen" in ready_session("get", "tinsmith", "--output=name")


@pytest.mark.parametrize(
    ("selector", "found"),
    [
        ("status.model=Qwen/Qwen3-8B", True),
        ("status.model=another", False),
        ("status.engine=peft", True),
        ("spec.suspend=true", False),
        ("spec.suspend=false", True),
    ],
)
def test_a_session_can_be_selected_by_its_model(selector: str, found: bool, ready_session: Kubectl) -> None:
    names = ready_session("get", "trainingsessions", f"--field-selector={selector}", "--output=name")
    assert bool(names.strip()) is found


def test_kubectl_waits_for_it(ready_session: Kubectl) -> None:
    ready_session("wait", "trainingsession/qwen", "--for=condition=Ready", "--timeout=60s")


@pytest.mark.usefixtures("definition")
def test_kubectl_explains_its_fields(api_cluster: Cluster) -> None:
    explained = api_cluster.kubectl("explain", "trainingsession.spec.adapters.slots")
    assert "Adapters in memory." in explained
