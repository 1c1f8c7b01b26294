"""Objects of the first revision: today's CRD takes them, and today's operator lets their workers run."""

from __future__ import annotations

import json
from typing import Any

from support.kubernetes.crds import fill_defaults, root_schema
from support.kubernetes.kubectl import KubectlUser, Kubelet
from support.operator.operators import (
    comes_to_rest,
    condition_of,
    eventually,
    operator_program,
    session_manifest,
    settings_for,
)
from support.operator.stored_objects import stored
from tinsmith_operator.common.drift import holds
from tinsmith_operator.kube.resources import PODS, SESSIONS

NEW_IMAGE = "tinsmith.local/tinsmith/trainer:0.2.0"


async def test_todays_definition_takes_each_with_its_status(hands: KubectlUser) -> None:
    for name, found in stored(1).items():
        kept = await hands.create(SESSIONS, {**found.session, "metadata": {"name": name}})
        assert kept["spec"] == fill_defaults(found.session["spec"], root_schema()["properties"]["spec"]), name
        kept = await hands.patch(SESSIONS, name, {"status": found.session["status"]}, "status")
        assert holds(kept["status"], found.session["status"]), name
        await hands.patch(SESSIONS, name, {"metadata": {"labels": {"touched": "true"}}})


async def test_a_worker_runs_on_through_an_upgrade_of_the_operator_and_back(
    hands: KubectlUser, kubelet: Kubelet
) -> None:
    async def pod_uids() -> set[str]:
        return {pod["metadata"]["uid"] for pod in await hands.all(PODS)}

    async def knows_of_the_new_image() -> dict[str, Any] | None:
        session = await hands.get(SESSIONS, "tiny")
        return session if condition_of(session, "UpgradeAvailable").get("status") == "True" else None

    async with operator_program(settings_for(hands.namespace)):
        await hands.create(SESSIONS, session_manifest())
        await comes_to_rest(hands, "WorkerReady")
    before = await pod_uids()
    async with operator_program(settings_for(hands.namespace, trainer_image=NEW_IMAGE)):
        session = await eventually(knows_of_the_new_image, "today's operator has looked at the session")
        assert condition_of(session, "Ready")["status"] == "True"
        await comes_to_rest(hands, "WorkerReady")
        assert await pod_uids() == before
        # So that the operator before it has something to look at, too.
        await hands.patch(SESSIONS, "tiny", {"spec": {"storage": {"size": "11Gi"}}})
        await comes_to_rest(hands, "WorkerReady")
    async with operator_program(settings_for(hands.namespace)):
        await hands.patch(SESSIONS, "tiny", {"spec": {"storage": {"size": "12Gi"}}})
        session = await comes_to_rest(hands, "WorkerReady")
    assert await pod_uids() == before, json.dumps(session["status"])
