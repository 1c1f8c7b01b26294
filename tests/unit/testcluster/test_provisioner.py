"""Which volume a claim gets, when it grows, and when it goes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from testcluster.kubernetes.provisioner import is_released, wanted_capacity, wanted_volume

Document = dict[str, Any]
DIRECTORY = Path("/volumes")


def claim(storage_class: str, *, node: str | None = None, size: str = "1Gi", **changes: Any) -> Document:
    annotations = {} if node is None else {"volume.kubernetes.io/selected-node": node}
    spec = {
        "storageClassName": storage_class,
        "accessModes": ["ReadWriteOncePod"],
        "resources": {"requests": {"storage": size}},
        **changes,
    }
    return {"metadata": {"name": "data", "namespace": "here", "uid": "u1", "annotations": annotations}, "spec": spec}


def volume(size: str = "1Gi", phase: str = "Bound", policy: str = "Delete") -> Document:
    return {
        "spec": {"capacity": {"storage": size}, "persistentVolumeReclaimPolicy": policy},
        "status": {"phase": phase},
    }


def test_a_local_volume_lies_on_the_node_that_the_scheduler_chose() -> None:
    wanted = wanted_volume(claim("local", node="node-2"), DIRECTORY)
    assert wanted is not None
    [term] = wanted["spec"]["nodeAffinity"]["required"]["nodeSelectorTerms"]
    assert term["matchExpressions"][0]["values"] == ["node-2"]
    assert wanted["spec"]["local"]["path"] == "/volumes/pvc-u1"


def test_a_local_volume_waits_for_the_scheduler() -> None:
    assert wanted_volume(claim("local"), DIRECTORY) is None


def test_a_shared_volume_is_made_at_once_and_lies_on_every_node() -> None:
    wanted = wanted_volume(claim("shared"), DIRECTORY)
    assert wanted is not None
    assert "nodeAffinity" not in wanted["spec"]
    assert wanted["spec"]["hostPath"]["path"] == "/volumes/pvc-u1"


def test_a_volume_is_kept_for_its_claim_and_takes_over_what_it_asked_for() -> None:
    wanted = wanted_volume(claim("shared", size="3Gi"), DIRECTORY)
    assert wanted is not None
    assert wanted["spec"]["claimRef"]["uid"] == "u1"
    assert wanted["spec"]["capacity"] == {"storage": "3Gi"}
    assert wanted["spec"]["accessModes"] == ["ReadWriteOncePod"]


def test_claims_of_other_classes_or_with_a_volume_are_left_alone() -> None:
    assert wanted_volume(claim("standard"), DIRECTORY) is None
    assert wanted_volume(claim("shared", volumeName="pvc-u1"), DIRECTORY) is None


def test_a_claim_that_is_being_deleted_gets_no_volume() -> None:
    deleted = claim("shared")
    deleted["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert wanted_volume(deleted, DIRECTORY) is None


@pytest.mark.parametrize(("asked", "has", "expected"), [("2Gi", "1Gi", "2Gi"), ("1024Mi", "1Gi", None)])
def test_a_volume_grows_to_what_its_claim_asks(asked: str, has: str, expected: str | None) -> None:
    assert wanted_capacity(claim("local", size=asked), volume(has)) == expected


@pytest.mark.parametrize(
    ("phase", "policy", "goes"),
    [("Released", "Delete", True), ("Bound", "Delete", False), ("Released", "Retain", False)],
)
def test_a_volume_goes_when_its_claim_is_gone_and_it_is_not_retained(phase: str, policy: str, goes: bool) -> None:
    assert is_released(volume(phase=phase, policy=policy)) is goes
