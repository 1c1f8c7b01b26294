"""The hash of the fields that shape a worker's pod. A pod with another hash is restarted.

So these hashes are a promise to sessions that run: were one of them to change, the operator that changes it would
restart every worker of that kind as soon as it is installed. `make golden` does not write them. Something new that can
be said belongs into the hash only where it is said.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.operator.built_sessions import BUILT
from support.operator.resources import INSTALLATION, make_session
from tinsmith_operator.api.names import INPUTS_ANNOTATION, RESTART_REQUEST_ANNOTATION
from tinsmith_operator.build.worker import PinnedImage, WorkerPlan, inputs_hash
from tinsmith_operator.build.workload import build_workload

# Of the first revision that had an operator, whose images had this name.
IMAGE = "tinsmith.local/tinsmith/trainer:0.1.0"
HASHES = {
    "minimal": "eb190328960a4dac",
    "full": "f15ea96c9dab4228",
    "hub": "5cb715f459206685",
    "gpu": "5f7e74f2a02e8a78",
    "suspended": "20fcbf1ab1b499f2",
}
PLAN = WorkerPlan("claim-uid", PinnedImage("trainer:1", None), 1)


@pytest.mark.parametrize(("name", "expected"), HASHES.items(), ids=HASHES)
def test_no_operator_restarts_a_worker_because_it_hashes_otherwise(name: str, expected: str) -> None:
    built = BUILT[name]
    then = replace(built, installation=replace(built.installation, trainer_image=IMAGE))
    [workload] = [each for each in then.objects() if each["kind"] == "StatefulSet"]
    assert workload["spec"]["template"]["metadata"]["annotations"][INPUTS_ANNOTATION] == expected


@pytest.mark.parametrize(
    "changes",
    [
        {"checkpoint_environment": {"AWS_REGION": "eu-north-1"}},
        {"checkpoint_secret": "store"},
        {"checkpoint_root": "s3://elsewhere"},
        {"tracing_endpoint": "http://collector:4318"},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_every_change_of_the_checkpoint_root_or_the_collector_restarts_the_workers(changes: dict[str, Any]) -> None:
    installation = replace(INSTALLATION, **changes)
    assert inputs_hash(make_session(), installation, PLAN) != inputs_hash(make_session(), INSTALLATION, PLAN)


def test_settings_of_the_operator_alone_restart_no_worker() -> None:
    installation = replace(INSTALLATION, trainer_image="other:2", hang_timeout_seconds=1, delete_grace_seconds=1)
    assert inputs_hash(make_session(), installation, PLAN) == inputs_hash(make_session(), INSTALLATION, PLAN)


def test_a_request_to_restart_is_in_the_hash_and_on_the_pod_only_once_it_was_made() -> None:
    at = "2026-02-01T12:00:00Z"
    asked = replace(PLAN, restart=at)
    assert inputs_hash(make_session(), INSTALLATION, asked) != inputs_hash(make_session(), INSTALLATION, PLAN)
    template = build_workload(make_session(), INSTALLATION, asked)["spec"]["template"]
    assert template["metadata"]["annotations"][RESTART_REQUEST_ANNOTATION] == at
    template = build_workload(make_session(), INSTALLATION, PLAN)["spec"]["template"]
    assert RESTART_REQUEST_ANNOTATION not in template["metadata"]["annotations"]
