"""With two nodes, pods of both reach each other, and a lost node is noticed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.kubernetes.fixtures import Cluster
from testcluster.programs.archives import write_archive
from testcluster.programs.builds import HELLO, built

IMAGE = "docker.io/tinsmith/test-hello:1"
FIRST, SECOND = "node-1", "node-2"


def hello_pod(node: str) -> dict[str, object]:
    security = {"runAsNonRoot": True, "runAsUser": 65532, "seccompProfile": {"type": "RuntimeDefault"}}
    container = {
        "name": "hello",
        "image": IMAGE,
        "imagePullPolicy": "Never",
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "readinessProbe": {"httpGet": {"path": "/", "port": 8080}, "periodSeconds": 1},
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": f"on-{node}"},
        "spec": {
            "nodeName": node,
            "terminationGracePeriodSeconds": 1,
            "securityContext": security,
            "containers": [container],
        },
    }


@pytest.fixture
def inside(two_node_cluster: Cluster, namespace: str, tmp_path: Path) -> str:
    """A namespace with a pod on each node."""
    two_node_cluster.load_image(write_archive(tmp_path / "hello.tar", IMAGE, built(HELLO) / "hello"))
    for node in two_node_cluster.nodes:
        pod = json.dumps(hello_pod(node))
        two_node_cluster.kubectl(f"--namespace={namespace}", "apply", "--filename=-", stdin=pod)
    ready = ["wait", "pods", "--all", "--for=condition=Ready", "--timeout=180s"]
    two_node_cluster.kubectl(f"--namespace={namespace}", *ready)
    return f"--namespace={namespace}"


@pytest.mark.parametrize(("asking", "asked"), [(FIRST, SECOND), (SECOND, FIRST)])
def test_pods_reach_those_of_the_other_node(asking: str, asked: str, two_node_cluster: Cluster, inside: str) -> None:
    address = two_node_cluster.kubectl(inside, "get", "pod", f"on-{asked}", "--output=jsonpath={.status.podIP}")
    url = f"http://{address}:8080"
    assert two_node_cluster.kubectl(inside, "exec", f"on-{asking}", "--", "/hello", "get", url) == f"on-{asked}\n"


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
