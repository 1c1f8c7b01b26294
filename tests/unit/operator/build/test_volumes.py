"""The volumes that a pod mounts."""

from __future__ import annotations

from typing import Any

from support.operator.built_sessions import NEMO_RL
from support.operator.resources import INSTALLATION, make_session
from tinsmith_operator.api.base import Manifest
from tinsmith_operator.build.worker import PinnedImage, WorkerPlan
from tinsmith_operator.build.workload import build_workload

PLAN = WorkerPlan("claim-uid", PinnedImage("image", None), 1)
MODEL = {
    "name": "demo/tiny",
    "source": {"type": "PersistentVolumeClaim", "persistentVolumeClaim": {"claimName": "models"}},
}


def pod_of(**spec: Any) -> Manifest:
    pod: Manifest = build_workload(make_session(**spec), INSTALLATION, PLAN)["spec"]["template"]["spec"]
    return pod


def volumes_of(pod: Manifest, claim: str) -> list[Manifest]:
    return [each for each in pod["volumes"] if each.get("persistentVolumeClaim", {}).get("claimName") == claim]


def test_a_claim_for_two_purposes_is_one_volume_that_can_be_written_to() -> None:
    """The kubelet never mounts the second volume of a pod that names one claim twice."""
    pod = pod_of(**NEMO_RL, model=MODEL, modelCache={"claimName": "models"})
    [volume] = volumes_of(pod, "models")
    assert "readOnly" not in volume["persistentVolumeClaim"]
    mounts = [each for each in pod["containers"][0]["volumeMounts"] if each["name"] == volume["name"]]
    assert [(each["mountPath"], each.get("readOnly", False)) for each in mounts] == [
        ("/models", True),
        ("/home/tinsmith/huggingface", False),
    ]


def test_claims_of_their_own_stay_volumes_of_their_own() -> None:
    pod = pod_of(**NEMO_RL, model=MODEL, modelCache={"claimName": "cache"})
    [models], [cache] = volumes_of(pod, "models"), volumes_of(pod, "cache")
    assert models["name"] != cache["name"]
    assert models["persistentVolumeClaim"]["readOnly"]


def test_every_mount_has_its_volume() -> None:
    pod = pod_of(**NEMO_RL, model=MODEL, modelCache={"claimName": "models"})
    names = {volume["name"] for volume in pod["volumes"]}
    assert {mount["name"] for mount in pod["containers"][0]["volumeMounts"]} == names
