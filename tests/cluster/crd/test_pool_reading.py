"""The view of a SamplerPool for people and programs that read it."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from cluster.crd.conftest import Kubectl, stored_with_status
from cluster.crd.test_reading import cells
from support.kubernetes.api_server import ApiServer
from support.kubernetes.fixtures import Cluster
from support.operator.pool_world import PoolWorld
from support.operator.resources import pool_manifest
from tinsmith_operator.api.status import SamplerPoolStatus


@pytest.fixture(scope="module")
def ready_pool(api_cluster: Cluster, api_server: ApiServer, definition: None) -> Iterator[Kubectl]:
    """kubectl in a namespace with one pool, which tests only read."""
    world = PoolWorld(pool_manifest(replicas=2))
    world.settle()
    manifest = pool_manifest(replicas=2)
    manifest["metadata"] = {"name": "qwen"}
    assert world.owner is not None
    with stored_with_status(api_cluster, api_server, manifest, world.owner["status"]) as kubectl:
        yield kubectl


def test_a_pools_status_comes_back_as_it_was_written(ready_pool: Kubectl) -> None:
    status = json.loads(ready_pool("get", "samplerpool", "qwen", "--output=json"))["status"]
    assert SamplerPoolStatus.model_validate(status).to_manifest() == status


def test_a_list_of_pools_shows_the_main_columns(ready_pool: Kubectl) -> None:
    shown = cells(ready_pool("get", "spool"))
    assert shown.pop("AGE")
    assert shown == {
        "NAME": "qwen",
        "READY": "True",
        "REASON": "ReplicasReady",
        "MODEL": "Qwen/Qwen3-8B",
        "ENGINE": "builtin",
        "DESIRED": "2",
        "REPLICAS": "2",
    }


@pytest.mark.parametrize(
    ("selector", "found"),
    [("spec.model.name=Qwen/Qwen3-8B", True), ("spec.model.name=another", False), ("spec.engine=builtin", True)],
)
def test_a_pool_can_be_selected_by_its_model(selector: str, found: bool, ready_pool: Kubectl) -> None:
    names = ready_pool("get", "samplerpools", f"--field-selector={selector}", "--output=name")
    assert bool(names.strip()) is found
