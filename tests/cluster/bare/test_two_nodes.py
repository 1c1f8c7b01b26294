"""A cluster of two nodes: pods of both reach each other, and a lost node is noticed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.kubernetes.fixtures import Cluster
from support.kubernetes.hello import hello_pod, load_hello

FIRST, SECOND = "node-1", "node-2"


@pytest.fixture
def inside(two_node_cluster: Cluster, namespace: str, tmp_path: Path) -> str:
    """Return a namespace with a pod on each node."""
    load_hello(two_node_cluster, tmp_path)
    for node in two_node_cluster.nodes:
        pod = json.dumps(hello_pod(f"on-{node}", node=node))
        two_node_cluster.kubectl(f"--namespace={namespace}", "apply", "--filename=-", stdin=pod)
    ready = ["wait", "pods", "--all", "--for=condition=Ready", "--timeout=180s"]
    two_node_cluster.kubectl(f"--namespace={namespace}", *ready)
    return f"--namespace={namespace}"


@pytest.mark.parametrize(("asking", "target"), [(FIRST, SECOND), (SECOND, FIRST)])
def test_pods_reach_those_of_the_other_node(asking: str, target: str, two_node_cluster: Cluster, inside: str) -> None:
    address = two_node_cluster.kubectl(inside, "get", "pod", f"on-{target}", "--output=jsonpath={.status.podIP}")
    url = f"http://{address}:8080"
    assert two_node_cluster.kubectl(inside, "exec", f"on-{asking}", "--", "/hello", "get", url) == f"on-{target}\n"


def test_a_node_that_is_cut_off_is_not_ready_until_it_comes_back(two_node_cluster: Cluster, inside: str) -> None:
    two_node_cluster.cut_off(SECOND)
    two_node_cluster.kubectl("wait", f"node/{SECOND}", "--for=condition=Ready=Unknown", "--timeout=180s")
    two_node_cluster.reconnect(SECOND)
    two_node_cluster.kubectl("wait", f"node/{SECOND}", "--for=condition=Ready", "--timeout=180s")
    started = two_node_cluster.kubectl(
        inside, "get", "pod", f"on-{SECOND}", "--output=jsonpath={.status.containerStatuses[0].restartCount}"
    )
    assert started == "0"


def test_a_node_that_lost_its_power_is_not_ready_either(two_node_cluster: Cluster, inside: str) -> None:
    """The last of this file: the node stays off."""
    two_node_cluster.power_off(SECOND)
    two_node_cluster.kubectl("wait", f"node/{SECOND}", "--for=condition=Ready=Unknown", "--timeout=180s")
    two_node_cluster.kubectl(inside, "delete", "pod", f"on-{SECOND}", "--grace-period=0", "--force")
