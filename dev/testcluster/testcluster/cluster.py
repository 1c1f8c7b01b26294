"""A running cluster for tests and people. The cluster was made by this package or named by the user."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

from testcluster import kind
from testcluster.commands import attempt
from testcluster.errors import ClusterError
from testcluster.kubernetes.containerd import Containerd, LoadedImage, load
from testcluster.kubernetes.network import claimed
from testcluster.kubernetes.node import Node
from testcluster.loading import load_command
from testcluster.places import Places
from testcluster.programs.builds import KUBERNETES, built
from testcluster.record import Record

CONTEXT_VARIABLE = "TINSMITH_TEST_CONTEXT"
INGRESS_VARIABLE = "TINSMITH_TEST_INGRESS"
# Longer than every timeout that callers give to `kubectl wait`.
_KUBECTL_SECONDS = 900.0
_LOG_LINES = 20
_POD_SECURITY = {"pod-security.kubernetes.io/enforce": "restricted", "pod-security.kubernetes.io/warn": "restricted"}


@dataclass(frozen=True)
class Cluster:
    """A running cluster. `ingress_address` is None if no Ingress controller is known.

    `runtimes` is empty for a cluster of the user.
    """

    name: str
    kubeconfig: Path
    kubectl_program: Path
    nodes: tuple[str, ...]
    ingress_address: str | None = None
    runtimes: tuple[Containerd, ...] = ()

    @property
    def ingress_url(self) -> str:
        """Return the address of the Ingress controller. Raises ClusterError if no address is configured."""
        if self.ingress_address is None:
            raise ClusterError(f"The ingress of {self.kubeconfig} is unknown: set {INGRESS_VARIABLE} to its address.")
        return f"http://{self.ingress_address}"

    def kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        """Run kubectl, and return the output. If kubectl fails, raises ClusterError with kubectl's own message."""
        return self.kubectl_bytes(*arguments, stdin=None if stdin is None else stdin.encode()).decode()

    def kubectl_bytes(self, *arguments: str, stdin: bytes | None = None) -> bytes:
        command = [str(self.kubectl_program), f"--kubeconfig={self.kubeconfig}", *arguments]
        finished = subprocess.run(
            command, input=stdin or b"", capture_output=True, timeout=_KUBECTL_SECONDS, check=False
        )
        if finished.returncode != 0:
            raise ClusterError(f"kubectl {' '.join(arguments)}: {finished.stderr.decode().strip()}")
        return finished.stdout

    def make_namespace(self, name: str) -> None:
        """Create a namespace that admits only restricted pods. Return when pods can be created in the namespace."""
        document = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": _POD_SECURITY}}
        self.kubectl("apply", "--filename=-", stdin=json.dumps(document))
        self.kubectl(f"--namespace={name}", "wait", "serviceaccount/default", "--for=create", "--timeout=120s")

    def delete_namespace(self, name: str) -> None:
        """Delete a namespace, and return when all pods in the namespace are gone.

        The other objects of the namespace vanish within seconds.
        """
        self.kubectl("delete", "namespace", name, "--ignore-not-found", "--wait=false")
        # A cluster without nodes has no kubelet that would stop the pods that a test assigned.
        if self.nodes:
            self.kubectl(f"--namespace={name}", "wait", "pods", "--all", "--for=delete", "--timeout=180s")

    def load_image(self, archive: Path) -> list[LoadedImage]:
        """Load the images of an archive into every node. For a cluster of the user, run the user's load command.

        Raises ClusterError if the load fails, or if no load command is configured.
        """
        return load(archive, self.runtimes) if self.runtimes else load_command().load(archive)

    def kill_container(self, namespace: str, pod: str, container: str) -> None:
        """Kill the first process of the container, like the kernel when memory runs out.

        The kubelet restarts the container.
        """
        self._signal_container(namespace, pod, container, signal.SIGKILL)

    def freeze_container(self, namespace: str, pod: str, container: str) -> None:
        """Freeze the first process of the container. Only `kill_container` can end a frozen process."""
        self._signal_container(namespace, pod, container, signal.SIGSTOP)

    def _signal_container(self, namespace: str, pod: str, container: str, number: signal.Signals) -> None:
        query = f"--output=jsonpath={{.status.containerStatuses[?(@.name=={json.dumps(container)})].containerID}}"
        found = self.kubectl(f"--namespace={namespace}", "get", "pod", pod, query)
        node = self.kubectl(f"--namespace={namespace}", "get", "pod", pod, "--output=jsonpath={.spec.nodeName}")
        if not found:
            raise ClusterError(f"Pod {pod} has no running container {container}.")
        self._known_runtimes()[self.nodes.index(node)].kill(found.removeprefix("containerd://"), number)

    def cut_off(self, node: str) -> None:
        """Disconnect the node.

        The node's pods continue to run, but until `reconnect` the cluster does not see the pods of the node.
        """
        self._expendable(node).disconnect()

    def reconnect(self, node: str) -> None:
        self._expendable(node).reconnect()

    def power_off(self, node: str) -> None:
        """Kill the node and all its processes permanently."""
        self._expendable(node).power_off()

    def _expendable(self, node: str) -> Node:
        """Return a node of this cluster that does not run the control plane.

        Raises ClusterError if the node does not exist or runs the control plane.
        """
        places = Places(self.name) if self.name else None
        members = own_nodes(places, len(self.nodes)) if places else []
        for member in members[1:]:
            if member.name == node:
                return member
        raise ClusterError(f"{node} is no node to lose: use `--nodes 2` and the second one.")

    def logs(self) -> str:
        """Return the end of the log of each process. For a cluster of the user, return no logs."""
        files = sorted(Places(self.name).logs.glob("*.log")) if self.name else []
        ends = [(file.stem, file.read_text(errors="replace").splitlines()[-_LOG_LINES:]) for file in files]
        return "\n".join(f"== {name}\n" + "\n".join(lines) for name, lines in ends)

    def _known_runtimes(self) -> tuple[Containerd, ...]:
        if not self.runtimes:
            raise ClusterError(f"The nodes of {self.kubeconfig} are out of reach: their containerd is not ours.")
        return self.runtimes


def recorded(record: Record) -> Cluster:
    """Return the cluster that a record describes."""
    places = Places(record.name)
    return Cluster(
        name=record.name,
        kubeconfig=Path(record.kubeconfig),
        kubectl_program=Path(record.kubectl),
        nodes=record.nodes,
        ingress_address=record.ingress_address or os.environ.get(INGRESS_VARIABLE),
        runtimes=_runtimes(places, record),
    )


def _runtimes(places: Places, record: Record) -> tuple[Containerd, ...]:
    if record.maker == "kind":
        return (kind.containerd(places),)
    return tuple(node.containerd for node in own_nodes(places, len(record.nodes)))


def own_nodes(places: Places, count: int) -> list[Node]:
    network = claimed(places)
    return [] if network is None else [Node(places, network, number) for number in range(1, count + 1)]


def configured_cluster() -> Cluster | None:
    """Return the cluster of KUBECONFIG if TINSMITH_TEST_CONTEXT names the current context.

    TINSMITH_TEST_CONTEXT confirms that tests may write to this cluster. KUBECONFIG alone is not enough, because it may
    name a cluster that is in use. Raises ClusterError if KUBECONFIG and TINSMITH_TEST_CONTEXT name different contexts.
    """
    confirmed, kubeconfig = os.environ.get(CONTEXT_VARIABLE), os.environ.get("KUBECONFIG")
    if not confirmed:
        return None
    if not kubeconfig:
        raise ClusterError(f"{CONTEXT_VARIABLE} is set and KUBECONFIG is not: set both, or neither.")
    program = find_kubectl()
    current = attempt(program, f"--kubeconfig={kubeconfig}", "config", "current-context").stdout.strip()
    if current != confirmed:
        raise ClusterError(
            f"KUBECONFIG's context is {current!r} and {CONTEXT_VARIABLE} is {confirmed!r}: make them agree."
        )
    listed = Cluster("", Path(kubeconfig), program, ()).kubectl("get", "nodes", "--output=name")
    nodes = tuple(line.removeprefix("node/") for line in listed.split())
    return Cluster("", Path(kubeconfig), program, nodes, os.environ.get(INGRESS_VARIABLE))


def find_kubectl() -> Path:
    found = shutil.which("kubectl")
    return Path(found) if found else built(KUBERNETES) / "kubectl"
