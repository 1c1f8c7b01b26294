"""Reachability in a cluster: connections from inside pods, one at a time.

A refusal by a policy differs from a port on which no process listens: the latter is an error of the test.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from support.kubernetes.installation import Object
from testcluster.cluster import Cluster

IMAGE = "tinsmith.local/tinsmith/api-server:0.1.0"
DNS = "dns"
"""A target that asks for the cluster's DNS."""

# Run by the Python of the pod.
_CONNECT = """
import errno, json, socket, sys
from concurrent.futures import ThreadPoolExecutor
NO_WAY = {errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EPERM, errno.EACCES}
def look(target):
    try:
        if target == 'dns':
            socket.getaddrinfo('kubernetes.default.svc.cluster.local', 443)
        else:
            host, port = target.rsplit(':', 1)
            socket.create_connection((host, int(port)), timeout=3).close()
    except (TimeoutError, socket.gaierror):
        return 'kept out'
    except OSError as error:
        return 'kept out' if error.errno in NO_WAY else f'{type(error).__name__}: {error}'
    return 'reached'
targets = sys.argv[1:]
with ThreadPoolExecutor(len(targets)) as pool:
    print(json.dumps(dict(zip(targets, pool.map(look, targets)))))
"""


@dataclass(frozen=True)
class Place:
    """A pod to ask from, whose image has a Python."""

    cluster: Cluster
    namespace: str
    pod: str
    container: str | None = None

    def reaches(self, targets: Mapping[str, str]) -> set[str]:
        """Return the names of the targets, `address:port` each, that this pod can reach."""
        container = [] if self.container is None else [f"--container={self.container}"]
        command = ["exec", self.pod, *container, "--", "python3", "-c", _CONNECT, *targets.values()]
        said: dict[str, str] = json.loads(self.cluster.kubectl(f"--namespace={self.namespace}", *command))
        unknown = {
            name: said[target] for name, target in targets.items() if said[target] not in {"reached", "kept out"}
        }
        assert unknown == {}
        return {name for name, target in targets.items() if said[target] == "reached"}


def stranger(name: str, labels: Mapping[str, str], *, listens_on: int | None = None) -> Object:
    """Start a pod without labels, which the test asks to connect."""
    serving = ["-m", "http.server", str(listens_on)] if listens_on else ["-c", "import signal; signal.pause()"]
    container: Object = {
        "name": "stranger",
        "image": IMAGE,
        "imagePullPolicy": "IfNotPresent",
        "command": ["python3", *serving],
        "workingDir": "/tmp",
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    if listens_on:
        container["readinessProbe"] = {"tcpSocket": {"port": listens_on}, "periodSeconds": 1}
    user = {"runAsNonRoot": True, "runAsUser": 65532, "seccompProfile": {"type": "RuntimeDefault"}}
    spec = {
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": 1,
        "securityContext": user,
        "containers": [container],
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": dict(labels)}, "spec": spec}


def address(cluster: Cluster, namespace: str, pod: str) -> str:
    found = cluster.kubectl(f"--namespace={namespace}", "get", "pod", pod, "--output=jsonpath={.status.podIP}")
    assert found, f"{pod} has no address yet"
    return found
