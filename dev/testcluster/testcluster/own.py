"""A cluster that this package makes on this machine. With built programs, the cluster starts in seconds.

Tier `api` consists of etcd, the API server and the controller manager, on free ports of the loopback address. Several
clusters of tier `api` can run at the same time, and root rights are not needed. Tier `node` is a complete Kubernetes.
Each node is a network namespace with a separate containerd, kubelet, kube-proxy and control group. The first node also
runs the control plane, DNS and the ingress, as processes. The host can reach the addresses of nodes. Pods can reach the
host, but no other machine.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager

from testcluster.commands import run
from testcluster.kubernetes.certificates import create_authority
from testcluster.kubernetes.containerd import load
from testcluster.kubernetes.control_plane import ControlPlane, inside_ports
from testcluster.kubernetes.network import claim
from testcluster.kubernetes.node import CNI_PROGRAMS, Node
from testcluster.kubernetes.services import Services
from testcluster.places import Places
from testcluster.ports import free_ports
from testcluster.processes import ProcessTable
from testcluster.programs.archives import PAUSE_IMAGE, write_archive
from testcluster.programs.builds import COREDNS, KUBERAY, KUBERNETES, PAUSE, TRAEFIK, Program, built
from testcluster.record import Record, Tier

_NEEDED_PROGRAMS: dict[Tier, tuple[Program, ...]] = {
    "api": (KUBERNETES, KUBERAY),
    "node": (KUBERNETES, COREDNS, TRAEFIK, PAUSE),
}
_NEEDED_COMMANDS: dict[Tier, tuple[str, ...]] = {
    "api": ("etcd",),
    "node": ("etcd", "containerd", "ctr", "runc", "ip", "iptables", "nsenter", "conntrack", "curl", "nft"),
}


def missing(tier: Tier) -> str | None:
    """Return a sentence that says what this machine lacks for such a cluster, or None if nothing is missing."""
    if tier == "node" and os.geteuid() != 0:
        return "A test cluster with nodes makes network namespaces and containers: run as root."
    lacking = [command for command in _NEEDED_COMMANDS[tier] if shutil.which(command) is None]
    if tier == "node" and not CNI_PROGRAMS.is_dir():
        lacking.append("containernetworking-plugins")
    if lacking:
        return f"A test cluster needs {', '.join(lacking)}: `make debian-packages` installs them."
    unbuilt = [program.name for program in _NEEDED_PROGRAMS[tier] if not program.folder().is_dir()]
    if unbuilt and shutil.which("go") is None:
        return f"A test cluster needs {', '.join(unbuilt)}, built with Go 1.25 or newer: install it from https://go.dev/dl."
    return None


def build(tier: Tier) -> None:
    unbuilt = [program for program in _NEEDED_PROGRAMS[tier] if not program.folder().is_dir()]
    if unbuilt:
        names = ", ".join(program.name for program in unbuilt)
        print(f"to build first: {names}; on two cores that takes 4 to 8 minutes, once", flush=True)
    for program in unbuilt:
        built(program)


def start(places: Places, tier: Tier, nodes: int) -> Record:
    """Start the programs of the cluster.

    The programs must be built already. Raises ClusterError if a program does not start.
    """
    places.directory.mkdir(parents=True, exist_ok=True)
    return _start_api_tier(places) if tier == "api" else _start_node_tier(places, nodes)


def _start_api_tier(places: Places) -> Record:
    authority = create_authority(places.certificates)
    control_plane = ControlPlane(places, built(KUBERNETES), authority, "127.0.0.1", free_ports(4), None)
    with _step("the API server"):
        control_plane.start_api()
    control_plane.start_controllers(scheduler=False)
    services = Services(places, control_plane.programs / "kubectl")
    services.apply("storage-classes.yaml")
    with _step("the controllers"):
        control_plane.wait_for_controllers()
    return _record(control_plane, "api", [])


def _start_node_tier(places: Places, nodes: int) -> Record:
    network = claim(places)
    with _step("the network"):
        network.create(nodes)
    members = [Node(places, network, number) for number in range(1, nodes + 1)]
    control_plane = _control_plane_on(members[0])
    with _step("the API server"):
        control_plane.start_api()
    control_plane.start_controllers(scheduler=True)
    with _step("containerd"):
        for node in members:
            node.start_containerd()
        pause = write_archive(places.directory / "pause.tar", PAUSE_IMAGE, built(PAUSE) / "pause")
        load(pause, [node.containerd for node in members])
    services = Services(places, control_plane.programs / "kubectl")
    services.start_policies(members)
    for node in members:
        node.start_agents(control_plane)
    with _step("DNS, ingress and storage"):
        services.apply("storage-classes.yaml")
        services.start_storage()
        services.start_dns(members[0])
        services.start_ingress(members[0])
        services.wait_until_ready(members[0])
    with _step("the controllers and nodes"):
        control_plane.wait_for_controllers()
        for node in members:
            _wait_until_ready(control_plane, node)
    return _record(control_plane, "node", members)


def _control_plane_on(node: Node) -> ControlPlane:
    """Return the control plane for the first node.

    On the first node, the control plane can reach the addresses of Services.
    """
    authority = create_authority(node.places.certificates)
    namespace = node.network.namespace(node.number)
    return ControlPlane(node.places, built(KUBERNETES), authority, node.address, inside_ports(), namespace)


def _wait_until_ready(control_plane: ControlPlane, node: Node) -> None:
    # List all nodes, because the node may not be registered yet.
    query = ["get", "nodes", f"--field-selector=metadata.name={node.name}"]
    ready = '--output=jsonpath={.items[*].status.conditions[?(@.type=="Ready")].status}'
    kubectl, kubeconfig = control_plane.programs / "kubectl", f"--kubeconfig={node.places.kubeconfig}"
    ProcessTable(node.places).wait_until(
        f"{node.name} is ready", lambda: run(kubectl, kubeconfig, *query, ready).strip() == "True", needs=node.processes
    )


def _record(control_plane: ControlPlane, tier: Tier, members: list[Node]) -> Record:
    places = control_plane.places
    return Record(
        name=places.name,
        tier=tier,
        maker="ourselves",
        kubeconfig=str(places.kubeconfig),
        kubectl=str(control_plane.programs / "kubectl"),
        nodes=tuple(node.name for node in members),
        ingress_address=members[0].address if members else None,
    )


@contextmanager
def _step(what: str) -> Iterator[None]:
    started = time.monotonic()
    print(f"starting {what} …", flush=True)
    yield
    print(f"started {what} in {time.monotonic() - started:.1f} s", flush=True)
