"""The arguments and devices of the pods of a divided model."""

from __future__ import annotations

from typing import Any

import pytest
from support.operator.built_sessions import MILES, NEMO_RL
from support.operator.resources import INSTALLATION, make_session
from tinsmith_operator.api.base import Manifest
from tinsmith_operator.build.worker import PinnedImage, WorkerPlan
from tinsmith_operator.build.workload import build_workload

PLAN = WorkerPlan("claim-uid", PinnedImage("image", None), 1)
ENGINES = pytest.mark.parametrize("divided", [NEMO_RL, MILES], ids=["nemo-rl", "miles"])
GPUS: Manifest = {"limits": {"nvidia.com/gpu": 8, "memory": "64Gi"}}


def pod_of(**spec: Any) -> Manifest:
    session = make_session(**spec)
    template: Manifest = build_workload(session, INSTALLATION, PLAN)["spec"]["template"]["spec"]
    return template


def options_of(pod: Manifest) -> dict[str, str]:
    pairs = (argument.removeprefix("--").partition("=") for argument in pod["containers"][0]["args"])
    return {option: value for option, _, value in pairs}


def variables_of(pod: Manifest) -> dict[str, str]:
    return {each["name"]: each.get("value", "") for each in pod["containers"][0]["env"]}


@ENGINES
@pytest.mark.parametrize(
    ("spec", "ranks"),
    [
        pytest.param({}, "0", id="one on the CPU is the worker itself"),
        pytest.param({"parallelism": {"tensor": 2, "pipeline": 2}}, "4", id="one copy of the model on the CPU"),
        pytest.param({"resources": GPUS}, "8", id="one for each GPU"),
        pytest.param({"resources": GPUS, "parallelism": {"tensor": 4}}, "8", id="GPUs beyond one copy hold others"),
        pytest.param({"resources": {"limits": {"nvidia.com/gpu": "1"}}}, "1", id="one GPU"),
    ],
)
def test_the_worker_gets_the_number_of_ranks(divided: Manifest, spec: Manifest, ranks: str) -> None:
    assert options_of(pod_of(**divided, **spec))["ranks"] == ranks


@ENGINES
def test_ranks_of_a_pod_share_its_threads(divided: Manifest) -> None:
    shared = {**divided, "parallelism": {"tensor": 2}}
    assert variables_of(pod_of(**shared, resources={"limits": {"cpu": 5}}))["OMP_NUM_THREADS"] == "2"
    assert variables_of(pod_of(**shared, resources={"limits": {"cpu": 1}}))["OMP_NUM_THREADS"] == "1"


@ENGINES
def test_shared_memory_is_a_quarter_of_the_memory_unless_the_spec_says_otherwise(divided: Manifest) -> None:
    def size(**pod: Any) -> str:
        volumes = pod_of(engine=divided["engine"], pod={**divided["pod"], **pod}, resources=GPUS)["volumes"]
        [shared] = [volume["emptyDir"] for volume in volumes if volume["name"] == "shared-memory"]
        assert shared["medium"] == "Memory"
        text: str = shared["sizeLimit"]
        return text

    assert int(size()) == 16 * 2**30
    assert int(size(sharedMemory="2Gi")) == 2 * 2**30
