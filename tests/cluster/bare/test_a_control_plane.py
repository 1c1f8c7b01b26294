"""The cluster without nodes keeps objects, and its controllers work."""

from __future__ import annotations

import json

import pytest
from support.kubernetes.fixtures import Cluster
from testcluster.errors import ClusterError

SECURITY = {"runAsNonRoot": True, "runAsUser": 65532, "seccompProfile": {"type": "RuntimeDefault"}}
CONTAINER = {
    "name": "main",
    "image": "example.invalid/none:1",
    "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
}
STATEFUL_SET = {
    "apiVersion": "apps/v1",
    "kind": "StatefulSet",
    "metadata": {"name": "set"},
    "spec": {
        "serviceName": "set",
        "selector": {"matchLabels": {"app": "set"}},
        "template": {
            "metadata": {"labels": {"app": "set"}},
            "spec": {"securityContext": SECURITY, "containers": [CONTAINER]},
        },
    },
}
CAREFREE_POD = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"name": "carefree"},
    "spec": {"containers": [{"name": "main", "image": "example.invalid/none:1"}]},
}


def test_controllers_create_pending_pods_and_collect_objects_without_an_owner(
    api_cluster: Cluster, namespace: str
) -> None:
    inside = f"--namespace={namespace}"
    api_cluster.kubectl(inside, "apply", "--filename=-", stdin=json.dumps(STATEFUL_SET))
    api_cluster.kubectl(inside, "wait", "pod/set-0", "--for=create", "--timeout=120s")
    assert api_cluster.kubectl(inside, "get", "pod", "set-0", "--output=jsonpath={.status.phase}") == "Pending"
    api_cluster.kubectl(inside, "delete", "statefulset", "set")
    api_cluster.kubectl(inside, "wait", "pod/set-0", "--for=delete", "--timeout=120s")


def test_a_namespace_of_a_test_refuses_a_pod_that_is_not_restricted(api_cluster: Cluster, namespace: str) -> None:
    with pytest.raises(ClusterError, match="violates PodSecurity"):
        api_cluster.kubectl(f"--namespace={namespace}", "apply", "--filename=-", stdin=json.dumps(CAREFREE_POD))
