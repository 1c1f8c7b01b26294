"""A model on a template with warm sessions needs no start, and a changed template disturbs no program."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from cluster.node.conftest import EXAMPLES, wait_gone
from support.client.sdk import adam, next_token_datum
from support.kubernetes.installation import Installation, wait_for

NAME = "warm"
MODEL = "demo/warm"
SESSIONS = [f"{NAME}-{number}" for number in (1, 2, 3)]


@pytest.fixture
def template(installation: Installation, session: str) -> Iterator[str]:
    """Create a template with two warm sessions, on the model of the session of the examples."""
    manifest: dict[str, Any] = next(yaml.safe_load_all((EXAMPLES / "session-template.yaml").read_text()))
    manifest["metadata"]["name"], manifest["spec"]["model"]["name"] = NAME, MODEL
    installation.apply({**manifest, "spec": {**manifest["spec"], "maxSessions": 3, "warm": 2}})
    installation.wait_reason(NAME, "TemplateReady", kind="sessiontemplate")
    yield NAME
    installation.kubectl("delete", "sessiontemplate", NAME)
    installation.kubectl("delete", "trainingsession", "--wait=false", "--ignore-not-found", *SESSIONS)
    for name in SESSIONS:
        wait_gone(installation, "trainingsession", name)


def test_a_program_keeps_its_warm_session_while_the_others_are_replaced(
    installation: Installation, template: str
) -> None:
    def sessions() -> dict[str, dict[str, Any]]:
        found = {name: installation.get("trainingsession", name) for name in SESSIONS}
        return {name: each for name, each in found.items() if each is not None}

    def status() -> dict[str, Any]:
        live = installation.get("sessiontemplate", template) or {}
        is_current = live["status"]["observedGeneration"] == live["metadata"]["generation"]
        return dict(live["status"]) if is_current else {}

    first = {name: each["metadata"]["uid"] for name, each in sessions().items()}
    assert len(first) == 2
    with installation.service_client() as client:
        model = client.create_lora_training_client(MODEL, rank=8).result()
        wait_for(lambda: status().get("readyWarm") == 2 and status()["sessions"] == 3, 420, lambda: str(status()))
        [used] = [name for name in first if name not in status()["warmSessions"]]
        before = {name: each["metadata"]["uid"] for name, each in sessions().items()}
        installation.patch("sessiontemplate", template, {"spec": {"adapters": {"slots": 4, "maxRank": 16}}})
        wait_for(
            lambda: (status().get("stale"), status().get("readyWarm")) == (1, 2), 600, lambda: f"{status()} {before}"
        )
        after = {name: each["metadata"]["uid"] for name, each in sessions().items()}
        assert {name for name in after if after[name] == before[name]} == {used}
        model.forward_backward([next_token_datum([5, 9, 2, 14])], "cross_entropy").result()
        model.optim_step(adam(3e-3)).result()
