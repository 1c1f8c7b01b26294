"""A session that is valid but cannot work says why, and what to do about it; mended, it works."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from cluster.node.conftest import wait_gone
from support.kubernetes.installation import Installation, Object

NAME = "cannot-work"


def session_with(changes: Object) -> Object:
    spec: Object = {
        "model": source("models", "demo/tiny"),
        "resources": {"requests": {"cpu": "50m", "memory": "256Mi"}},
        "storage": {"size": "1Gi", "accessMode": "ReadWriteOnce"},
    }
    return {
        "apiVersion": "tinsmith.dev/v1alpha1",
        "kind": "TrainingSession",
        "metadata": {"name": NAME},
        "spec": {**spec, **changes},
    }


def from_secret(name: str) -> Object:
    return {"name": "X", "valueFrom": {"secretKeyRef": {"name": name, "key": "x"}}}


def source(claim: str, path: str) -> Object:
    claim_source = {"claimName": claim, "path": path}
    return {"name": "demo/other", "source": {"type": "PersistentVolumeClaim", "persistentVolumeClaim": claim_source}}


CASES: list[tuple[str, Object, str, str]] = [
    ("ImagePullFailed", {"pod": {"image": "images.invalid/none:1"}}, "images.invalid/none:1", "Correct spec.pod.image"),
    ("Unschedulable", {"resources": {"limits": {"nvidia.com/gpu": "1"}}}, "nvidia.com/gpu", "Add a node that fits"),
    ("Unschedulable", {"pod": {"nodeSelector": {"no-such": "node"}}}, "selector", "change how spec.pod selects"),
    ("ClaimMissing", {"model": source("no-such-claim", "")}, "no-such-claim", "Create"),
    ("SecretMissing", {"pod": {"env": [from_secret("none")]}}, "none", "Create"),
    ("ModelNotFound", {"model": source("models", "no/such/folder")}, "no/such/folder", "Put the model"),
    ("OutOfMemory", {"resources": {"limits": {"memory": "48Mi"}}}, "memory", "Raise spec.resources.limits.memory"),
    ("QuotaExceeded", {"resources": {"requests": {"memory": "900Gi"}}}, "quota", "Raise the quota"),
]


@pytest.fixture
def other_session(installation: Installation) -> Iterator[Installation]:
    yield installation
    installation.kubectl("delete", "trainingsession", NAME, "--ignore-not-found")
    wait_gone(installation, "pod", f"{NAME}-0")
    installation.kubectl("delete", "persistentvolumeclaim", f"{NAME}-journal", "--ignore-not-found")
    installation.kubectl("delete", "resourcequota", "--all")


@pytest.mark.parametrize(("reason", "changes", "cause", "cure"), CASES, ids=[f"{case[0]}-{case[2]}" for case in CASES])
def test_the_condition_names_the_cause_and_the_cure(
    reason: str, changes: Object, cause: str, cure: str, other_session: Installation
) -> None:
    if reason == "QuotaExceeded":
        quota: dict[str, Any] = {"hard": {"requests.memory": "8Gi"}}
        metadata = {"name": "small"}
        other_session.apply({"apiVersion": "v1", "kind": "ResourceQuota", "metadata": metadata, "spec": quota})
        other_session.kubectl("wait", "resourcequota/small", "--for=jsonpath={.status.hard}", "--timeout=120s")
    other_session.apply(session_with(changes))
    message = other_session.wait_reason(NAME, reason, 180)
    assert cause in message
    assert cure.lower() in message.lower()


def test_a_mended_session_serves(other_session: Installation) -> None:
    other_session.apply(session_with({"pod": {"nodeSelector": {"no-such": "node"}}}))
    other_session.wait_reason(NAME, "Unschedulable")
    other_session.patch("trainingsession", NAME, {"spec": {"pod": {"nodeSelector": None}}})
    other_session.wait_ready(NAME)


def test_a_foreign_object_is_left_alone_and_named(other_session: Installation) -> None:
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": NAME},
        "spec": {"ports": [{"port": 80}], "selector": {"app": "another-app"}},
    }
    other_session.apply(service)
    try:
        other_session.apply(session_with({}))
        message = other_session.wait_reason(NAME, "NameConflict")
        assert f"Service {NAME}" in message
        assert (other_session.get("service", NAME) or {})["spec"]["selector"] == {"app": "another-app"}
    finally:
        other_session.kubectl("delete", "service", NAME)
    other_session.wait_ready(NAME)
