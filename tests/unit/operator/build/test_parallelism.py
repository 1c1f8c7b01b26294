"""What pods of a divided model are told and given."""

from __future__ import annotations

from typing import Any

import pytest
from support.operator.built_sessions import MILES, NEMO_RL
from support.operator.resources import INSTALLATION, make_session
from tinsmith_operator.api.base import Manifest
from tinsmith_operator.build.worker import PinnedImage, WorkerPlan, grace_seconds
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


def paths_of(pod: Manifest) -> set[str]:
    return {mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}


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
def test_the_worker_is_told_how_many_ranks_there_are(divided: Manifest, spec: Manifest, ranks: str) -> None:
    assert options_of(pod_of(**divided, **spec))["ranks"] == ranks


def test_a_session_of_one_process_is_told_nothing_of_ranks() -> None:
    pod = pod_of(resources=GPUS)
    assert options_of(pod).keys().isdisjoint({"ranks", "nodes", "gpus-per-node", "tensor-parallel"})
    assert "RAY_USAGE_STATS_ENABLED" not in variables_of(pod)


@ENGINES
def test_ranks_of_a_pod_share_its_threads(divided: Manifest) -> None:
    shared = {**divided, "parallelism": {"tensor": 2}}
    assert variables_of(pod_of(**shared, resources={"limits": {"cpu": 5}}))["OMP_NUM_THREADS"] == "2"
    assert variables_of(pod_of(**shared, resources={"limits": {"cpu": 1}}))["OMP_NUM_THREADS"] == "1"


@ENGINES
def test_what_the_user_says_of_a_variable_wins(divided: Manifest) -> None:
    image = divided["pod"]["image"]
    env = [{"name": "NCCL_DEBUG", "value": "INFO"}, {"name": "NCCL_SOCKET_IFNAME", "value": "bond0"}]
    pod = pod_of(engine=divided["engine"], pod={"image": image, "env": env}, resources=GPUS)
    names = [each["name"] for each in pod["containers"][0]["env"]]
    assert names.count("NCCL_DEBUG") == 1
    assert {"NCCL_DEBUG": "INFO", "NCCL_SOCKET_IFNAME": "bond0"}.items() <= variables_of(pod).items()


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


@ENGINES
def test_a_rank_that_is_the_worker_itself_needs_no_room_for_ray(divided: Manifest) -> None:
    assert {"/tmp/ray", "/dev/shm"}.isdisjoint(paths_of(pod_of(**divided)))
    assert {"/tmp/ray", "/dev/shm"} <= paths_of(pod_of(**divided, parallelism={"tensor": 2}))


@ENGINES
def test_the_model_is_kept_in_its_cache_whether_or_not_that_outlives_the_pod(divided: Manifest) -> None:
    def cache(**spec: Any) -> Manifest:
        [volume] = [each for each in pod_of(**divided, **spec)["volumes"] if each["name"] == "model-cache"]
        return volume

    assert "emptyDir" in cache()
    assert cache(modelCache={"claimName": "shared"})["persistentVolumeClaim"] == {"claimName": "shared"}


@ENGINES
def test_adapters_of_several_ranks_get_the_time_that_gathering_them_takes(divided: Manifest) -> None:
    assert grace_seconds(make_session(**divided, resources=GPUS)) == 300
    assert grace_seconds(make_session(resources=GPUS)) == 60


def test_only_what_is_converted_is_told_where_the_converted_model_is() -> None:
    assert "NRL_MEGATRON_CHECKPOINT_DIR" in variables_of(pod_of(**NEMO_RL))
    assert "NRL_MEGATRON_CHECKPOINT_DIR" not in variables_of(pod_of(**MILES))
