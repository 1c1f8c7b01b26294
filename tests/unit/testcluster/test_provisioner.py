"""The volume of each claim, its growth and its removal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from testcluster.kubernetes.provisioner import is_released, requested_volume

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


def test_a_local_volume_waits_for_the_scheduler() -> None:
    assert requested_volume(claim("local"), DIRECTORY) is None


def test_claims_of_other_classes_or_with_a_volume_are_left_alone() -> None:
    assert requested_volume(claim("standard"), DIRECTORY) is None
    assert requested_volume(claim("shared", volumeName="pvc-u1"), DIRECTORY) is None


@pytest.mark.parametrize(
    ("phase", "policy", "goes"),
    [("Released", "Delete", True), ("Bound", "Delete", False), ("Released", "Retain", False)],
)
def test_a_volume_goes_when_its_claim_is_gone_and_it_is_not_retained(phase: str, policy: str, goes: bool) -> None:
    assert is_released(volume(phase=phase, policy=policy)) is goes
