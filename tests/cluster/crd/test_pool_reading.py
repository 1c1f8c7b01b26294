"""How a SamplerPool shows itself to people and programs that read it."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from cluster.crd.conftest import Kubectl, stored_with_status
from cluster.crd.test_pool_validation import pool
from cluster.crd.test_reading import cells
from support.kubernetes.api_server import ApiNamespace, ApiServer
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


def test_a_list_of_pools_shows_what_one_wants_to_know_first(ready_pool: Kubectl) -> None:
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


def test_a_wide_list_of_pools_shows_the_image_too(ready_pool: Kubectl) -> None:
    assert cells(ready_pool("get", "spool", "--output=wide"))["IMAGE"] == "tinsmith.local/tinsmith/trainer:0.1.0"


def test_a_pool_is_found_under_the_category(ready_pool: Kubectl) -> None:
    assert "samplerpool.tinsmith.dev/qwen" in ready_pool("get", "tinsmith", "--output=name")


@pytest.mark.parametrize(
    ("selector", "found"),
    [("spec.model.name=Qwen/Qwen3-8B", True), ("spec.model.name=another", False), ("spec.engine=builtin", True)],
)
def test_a_pool_can_be_selected_by_what_clients_ask_for(selector: str, found: bool, ready_pool: Kubectl) -> None:
    names = ready_pool("get", "samplerpools", f"--field-selector={selector}", "--output=name")
    assert bool(names.strip()) is found


def test_autoscalers_read_the_number_of_replicas_and_which_pods_they_are(ready_pool: Kubectl) -> None:
    scale = json.loads(ready_pool("get", "samplerpool", "qwen", "--subresource=scale", "--output=json"))
    assert scale["spec"] == {"replicas": 2}
    selector = "app.kubernetes.io/name=tinsmith-sampler,tinsmith.dev/pool=qwen"
    assert scale["status"] == {"replicas": 2, "selector": selector}


def test_kubectl_scales_a_pool(api_cluster: Cluster, api: ApiNamespace) -> None:
    with api.holding(pool(replicas=2)) as stored:
        api_cluster.kubectl(f"--namespace={api.name}", "scale", "samplerpool", "qwen", "--replicas=5")
        assert api.get(stored)["spec"]["replicas"] == 5


@pytest.mark.usefixtures("definition")
def test_kubectl_explains_the_fields_of_a_pool(api_cluster: Cluster) -> None:
    explained = api_cluster.kubectl("explain", "samplerpool.spec.adapters.maxLoaded")
    assert "Adapters that a replica keeps in memory." in explained
