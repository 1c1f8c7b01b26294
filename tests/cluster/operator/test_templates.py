"""Templates in a real API: users create sessions by name, and sessions without models stay warm."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.kubernetes.chart_account import grant, kubeconfig_of_the_account, rights_of
from support.kubernetes.fixtures import Cluster
from support.kubernetes.kubectl import KubectlUser, Kubelet
from support.operator.operators import (
    comes_to_rest,
    content_worker,
    eventually,
    running,
    session_manifest,
    settings_for,
)
from tinsmith_operator.api.names import API_VERSION, TEMPLATE_KIND
from tinsmith_operator.common.observed import WorkerReport
from tinsmith_operator.kube.resources import SESSIONS, TEMPLATES
from tinsmith_operator.runtime.worker_client import Target

DELETES = {"retentionPolicy": {"whenDeleted": "Delete"}}


def template_manifest(**spec: Any) -> dict[str, Any]:
    session = session_manifest(**spec)
    return {**session, "apiVersion": API_VERSION, "kind": TEMPLATE_KIND, "metadata": {"name": "tiny"}}


def from_template(name: str) -> dict[str, Any]:
    """Return the whole session of a user."""
    return {
        "apiVersion": API_VERSION,
        "kind": SESSIONS.kind,
        "metadata": {"name": name},
        "spec": {"templateRef": {"name": "tiny"}},
    }


class Workers:
    """All workers. `used` has the models of each, by the name of its session."""

    def __init__(self) -> None:
        self.used: dict[str, int] = {}

    async def describe(self, target: Target) -> WorkerReport:
        session = target.address.partition(".")[0]
        return replace(await content_worker(target), adapters_used=self.used.get(session, 0), idle_seconds=3600.0)


@pytest.fixture
def account(api_cluster: Cluster, hands: KubectlUser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Operators that the test starts have the rights of the chart's service account."""
    grant(api_cluster, rights_of(hands.namespace))
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig_of_the_account(api_cluster, hands.namespace, tmp_path)))


async def test_a_session_waits_for_its_template_and_keeps_the_spec_that_it_began_with(
    hands: KubectlUser, kubelet: Kubelet, account: None
) -> None:
    async with running(settings_for(hands.namespace)):
        await hands.create(SESSIONS, from_template("mine"))
        await comes_to_rest(hands, "TemplateNotFound", "mine")
        await hands.create(TEMPLATES, template_manifest(adapters={"slots": 3}))
        session = await comes_to_rest(hands, "WorkerReady", "mine")
        assert (session["status"]["model"], session["status"]["engine"]) == ("demo/tiny", "peft")
        copy = session["status"]["template"]
        await hands.patch(TEMPLATES, "tiny", {"spec": {"adapters": {"slots": 5}}})
        await comes_to_rest(hands, "TemplateReady", resource=TEMPLATES)
        await hands.delete(TEMPLATES, "tiny")
        await hands.patch(SESSIONS, "mine", {"spec": {"suspend": True}})
        suspended = await comes_to_rest(hands, "Suspended", "mine")
        assert suspended["status"]["template"] == copy
        assert '"slots":3' in copy["spec"]


async def test_warm_sessions_are_kept_and_outdated_ones_replaced_but_for_those_in_use(
    hands: KubectlUser, kubelet: Kubelet, account: None
) -> None:
    """The idle policy would delete them at once, if it applied to warm sessions."""
    workers = Workers()
    spec = {"storage": DELETES, "maxSessions": 3, "warm": 2, "idle": {"deleteAfterSeconds": 10}}
    async with running(settings_for(hands.namespace), describe=workers.describe):
        await hands.create(TEMPLATES, template_manifest(**spec))
        await comes_to_rest(hands, "TemplateReady", resource=TEMPLATES)
        workers.used["tiny-1"] = 1

        async def refilled() -> bool:
            status = (await hands.get(TEMPLATES, "tiny") or {})["status"]
            return bool(status["warmSessions"] == ["tiny-2", "tiny-3"] and status["readyWarm"] == 2)

        await eventually(refilled, "a third session takes the place of the used one")
        before = {each["metadata"]["name"]: each["metadata"]["uid"] for each in await hands.all(SESSIONS)}
        await hands.patch(TEMPLATES, "tiny", {"spec": {"adapters": {"slots": 5}}})

        async def replaced() -> bool:
            template = await hands.get(TEMPLATES, "tiny") or {}
            status = template["status"]
            current = status["observedGeneration"] == template["metadata"]["generation"]
            return bool(current and status["stale"] == 1 and status["readyWarm"] == 2)

        await eventually(replaced, "the two sessions without models are replaced")
        after = {each["metadata"]["name"]: each["metadata"]["uid"] for each in await hands.all(SESSIONS)}
        assert after.keys() == before.keys() == {"tiny-1", "tiny-2", "tiny-3"}
        assert {name for name in after if after[name] == before[name]} == {"tiny-1"}
