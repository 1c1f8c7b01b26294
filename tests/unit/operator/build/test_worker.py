"""The promises of a worker's pod, for any session."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.operator.built_sessions import EVERYTHING, REMOTE
from support.operator.resources import FROM_HUB, INSTALLATION, ON_CLAIM, make_session
from tinsmith_operator.api.base import Manifest
from tinsmith_operator.api.status import TrainingSessionStatus
from tinsmith_operator.api.training_session import TrainingSession
from tinsmith_operator.build.network import build_policy, build_session_policy
from tinsmith_operator.build.worker import PinnedImage, WorkerPlan, grace_seconds, inputs_hash
from tinsmith_operator.build.workload import build_workload
from tinsmith_operator.common.workloads import template_of

PLAN = WorkerPlan("claim-uid", PinnedImage("trainer:1", None), 1)


def pod_template(session: TrainingSession) -> Manifest:
    return template_of(build_workload(session, INSTALLATION, PLAN))


def worker(session: TrainingSession) -> Manifest:
    container: Manifest = pod_template(session)["spec"]["containers"][0]
    return container


def measured(seconds: int | None, **spec: Any) -> TrainingSession:
    return replace(make_session(**spec), status=TrainingSessionStatus(snapshot_seconds=seconds))


def test_a_worker_gets_the_number_of_places_only_if_the_spec_sets_it() -> None:
    """The worker derives the number from its slots, and an earlier image would not know the flag."""
    assert not [word for word in worker(make_session())["args"] if word.startswith("--model-places")]
    assert "--model-places=24" in worker(make_session(adapters={"slots": 4, "modelPlaces": 24}))["args"]


def test_a_worker_gets_numerics_only_if_the_spec_sets_them() -> None:
    assert not [word for word in worker(make_session())["args"] if word.startswith("--numerics")]
    assert "--numerics=exact" in worker(make_session(numerics="exact"))["args"]


def test_the_operators_labels_win_over_a_users() -> None:
    labels = pod_template(make_session(pod={"labels": {"tinsmith.dev/session": "another"}}))["metadata"]["labels"]
    assert labels["tinsmith.dev/session"] == "qwen"


def test_nothing_in_an_argument_is_taken_for_a_variable_or_an_option() -> None:
    session = make_session(source={**ON_CLAIM, "persistentVolumeClaim": {"claimName": "m", "path": "-$(HOME)"}})
    assert "--model=/models/-$$(HOME)" in worker(session)["args"]


def test_the_folder_of_a_model_has_one_spelling() -> None:
    source = {"type": "PersistentVolumeClaim", "persistentVolumeClaim": {"claimName": "m", "path": ""}}
    assert "--model=/models" in worker(make_session(source=source))["args"]


def test_a_worker_reports_the_requested_image_and_runs_its_digest() -> None:
    plan = WorkerPlan("u", PinnedImage("trainer:1", "trainer@sha256:ab"), 1)
    container = build_workload(make_session(), INSTALLATION, plan)["spec"]["template"]["spec"]["containers"][0]
    assert container["image"] == "trainer@sha256:ab"
    assert "--image=trainer:1" in container["args"]


@pytest.mark.parametrize(("timeout", "failures"), [(30, 6), (31, 7), (1800, 360)])
def test_the_startup_probe_waits_for_as_long_as_the_spec_says(timeout: int, failures: int) -> None:
    probe = worker(make_session(pod={"startupTimeoutSeconds": timeout}))["startupProbe"]
    assert (probe["failureThreshold"], probe["periodSeconds"]) == (failures, 5)


@pytest.mark.parametrize(("snapshot", "grace"), [(None, 60), (1, 60), (7, 60), (8, 90), (100, 450)], ids=str)
def test_the_time_to_stop_follows_the_measured_time_of_a_snapshot(snapshot: int | None, grace: int) -> None:
    assert grace_seconds(measured(snapshot)) == grace


@pytest.mark.parametrize(
    ("session", "installation"),
    [(make_session(source=FROM_HUB), INSTALLATION), (make_session(), replace(REMOTE, checkpoint_secret="store"))],
    ids=["model from the hub", "remote checkpoints"],
)
def test_a_pod_that_needs_the_outside_reaches_names_and_https(session: TrainingSession, installation: Any) -> None:
    ports = [port["port"] for rule in build_policy(session, installation)["spec"]["egress"] for port in rule["ports"]]
    assert sorted(set(ports)) == [53, 443]


def test_api_server_operator_and_samplers_of_its_namespace_may_reach_a_worker() -> None:
    rule, samplers = build_session_policy(make_session(), INSTALLATION)["spec"]["ingress"]
    [peer] = samplers["from"]
    assert peer == {"podSelector": {"matchLabels": {"app.kubernetes.io/name": "tinsmith-sampler"}}}
    assert [port["port"] for port in samplers["ports"]] == [7443]
    assert {peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"] for peer in rule["from"]} == {
        "api-server",
        "operator",
    }
    assert all(
        peer["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": "tinsmith-system"}
        for peer in rule["from"]
    )
    assert [port["port"] for port in rule["ports"]] == [7443]


@pytest.mark.parametrize(
    "changed",
    [{field: EVERYTHING[field]} for field in EVERYTHING if field != "storage"]
    + [{"pod": {name: value}} for name, value in EVERYTHING["pod"].items()],
    ids=lambda changed: ".".join([*changed, *changed.get("pod", ())][:2]),
)
def test_every_change_of_the_pod_by_a_user_restarts_it(changed: Manifest) -> None:
    assert inputs_hash(make_session(**changed), INSTALLATION, PLAN) != inputs_hash(make_session(), INSTALLATION, PLAN)


@pytest.mark.parametrize(
    "session",
    [make_session(suspend=True), make_session(storage={"size": "1Ti"}), make_session(engine="peft"), measured(500)],
    ids=["suspend", "larger volume", "a default, spelled out", "slower snapshots"],
)
def test_fields_outside_the_pod_do_not_restart_it(session: TrainingSession) -> None:
    assert inputs_hash(session, INSTALLATION, PLAN) == inputs_hash(make_session(), INSTALLATION, PLAN)


@pytest.mark.parametrize(
    ("resources", "threads"),
    [
        ({"limits": {"cpu": "2500m"}, "requests": {"cpu": 1}}, "3"),
        ({"requests": {"cpu": "4"}}, "4"),
        ({"limits": {"cpu": "100m"}}, "1"),
        ({"limits": {"cpu": 0}}, "1"),
        ({"limits": {"memory": "1Gi"}}, "1"),
        ({}, "1"),
    ],
    ids=repr,
)
def test_the_number_of_threads_follows_from_the_session_and_not_from_the_node(
    resources: dict[str, Any], threads: str
) -> None:
    assert {"name": "OMP_NUM_THREADS", "value": threads} in worker(make_session(resources=resources))["env"]


def test_a_users_number_of_threads_is_the_only_one() -> None:
    said = {"name": "OMP_NUM_THREADS", "value": "6"}
    env = worker(make_session(resources={"limits": {"cpu": 2}}, pod={"env": [said]}))["env"]
    assert [variable for variable in env if variable["name"] == "OMP_NUM_THREADS"] == [said]
