"""Pods of the test cluster's smallest program: each answers HTTP on port 8080 with its name, and can ask others."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from testcluster.cluster import Cluster
from testcluster.programs.archives import write_archive
from testcluster.programs.builds import HELLO, built

IMAGE = "tinsmith.local/tinsmith/test-hello:1"
PORT, PORT_NAME = 8080, "http"


def load_hello(cluster: Cluster, scratch: Path) -> None:
    cluster.load_image(write_archive(scratch / "hello.tar", IMAGE, built(HELLO) / "hello"))


def hello_pod(name: str, labels: Mapping[str, str] | None = None, *, node: str | None = None) -> dict[str, Any]:
    security = {"runAsNonRoot": True, "runAsUser": 65532, "seccompProfile": {"type": "RuntimeDefault"}}
    container = {
        "name": "hello",
        "image": IMAGE,
        "imagePullPolicy": "Never",
        "ports": [{"name": PORT_NAME, "containerPort": PORT}],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "readinessProbe": {"httpGet": {"path": "/", "port": PORT}, "periodSeconds": 1},
    }
    spec = {"terminationGracePeriodSeconds": 1, "securityContext": security, "containers": [container]}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": dict(labels or {})},
        "spec": {**spec, **({} if node is None else {"nodeName": node})},
    }
