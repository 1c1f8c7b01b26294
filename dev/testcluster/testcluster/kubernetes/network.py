"""The network of a cluster. Each node has a network namespace with a link to a bridge on the host.

The routes and packet filters of the host are not changed, and pods cannot reach other machines than the host.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from testcluster.commands import attempt, run
from testcluster.errors import ClusterError
from testcluster.places import Places, clusters_directory, locked

POD_RANGE = "10.244.0.0/16"
SERVICE_RANGE = "10.96.0.0/16"
_SUBNETS = range(1, 255)


@dataclass(frozen=True)
class Network:
    """Subnet `number` of 10.213.0.0/16. `cluster` is the name of the cluster that uses this subnet."""

    cluster: str
    number: int

    @property
    def bridge(self) -> str:
        return f"tinsmith{self.number}"

    @property
    def host_address(self) -> str:
        return f"10.213.{self.number}.1"

    def address(self, node: int) -> str:
        return f"10.213.{self.number}.{10 + node}"

    def namespace_name(self, node: int) -> str:
        return f"tinsmith-{self.cluster}-{node}"

    def namespace(self, node: int) -> Path:
        return Path("/run/netns") / self.namespace_name(node)

    def pods(self, node: int) -> str:
        return f"10.244.{node}.0/24"

    def host_leg(self, node: int) -> str:
        return f"{self.bridge}n{node}"

    def create(self, nodes: int) -> None:
        """Create the bridge. Create a namespace for each node, with routes to the pods on the other nodes."""
        run("ip", "link", "add", self.bridge, "type", "bridge")
        run("ip", "address", "add", f"{self.host_address}/24", "dev", self.bridge)
        run("ip", "link", "set", self.bridge, "up")
        for node in range(1, nodes + 1):
            self._create_node(node)
            for other in set(range(1, nodes + 1)) - {node}:
                self._inside(node, "ip", "route", "add", self.pods(other), "via", self.address(other))

    def _create_node(self, node: int) -> None:
        leg = self.host_leg(node)
        run("ip", "netns", "add", self.namespace_name(node))
        run("ip", "link", "add", leg, "type", "veth", "peer", "name", "eth0", "netns", self.namespace_name(node))
        run("ip", "link", "set", leg, "master", self.bridge, "up")
        self._inside(node, "ip", "link", "set", "lo", "up")
        self._inside(node, "ip", "address", "add", f"{self.address(node)}/24", "dev", "eth0")
        self._inside(node, "ip", "link", "set", "eth0", "up")
        self._inside(node, "ip", "route", "add", "default", "via", self.host_address)
        self._inside(node, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
        # Send an error for every refused packet, not only once a second.
        self._inside(node, "sh", "-c", "echo 0 > /proc/sys/net/ipv4/icmp_ratelimit")
        self._fence(node)
        # Pods use their node's address towards the host, because the host has no route back to a pod.
        rule = ["-s", POD_RANGE, "!", "-d", POD_RANGE, "-o", "eth0", "-j", "MASQUERADE"]
        self._inside(node, "iptables", "-t", "nat", "-A", "POSTROUTING", *rule)

    def _fence(self, node: int) -> None:
        """Reject packets that would leave the cluster.

        Without the rejection, the host would drop such packets, and the sender would wait for a timeout.
        """
        self._inside(node, "iptables", "-N", "OUTWARD")
        for inner in (f"{self.host_address}/24", POD_RANGE):
            self._inside(node, "iptables", "-A", "OUTWARD", "-d", inner, "-j", "RETURN")
        self._inside(node, "iptables", "-A", "OUTWARD", "-j", "REJECT")
        for chain in ("OUTPUT", "FORWARD"):
            self._inside(node, "iptables", "-A", chain, "-o", "eth0", "-j", "OUTWARD")

    def _inside(self, node: int, *command: str) -> None:
        run("nsenter", f"--net={self.namespace(node)}", *command)

    def delete(self) -> None:
        """Delete everything that `create` has made, even if `create` was interrupted."""
        for namespace in Path("/run/netns").glob(f"{self.namespace_name(0)[:-1]}*"):
            if namespace.name.removeprefix(self.namespace_name(0)[:-1]).isdigit():
                run("ip", "netns", "delete", namespace.name)
        # A namespace may exist for a moment after its name is deleted, and so may its link to the bridge.
        legs = [f"{self.bridge}n{node}" for node in range(1, 10)]
        for link in (*legs, self.bridge):
            attempt("ip", "link", "delete", link)

    def set_cable(self, node: int, state: Literal["up", "down"]) -> None:
        """Connect the node to the bridge, or disconnect the node."""
        run("ip", "link", "set", self.host_leg(node), state)


def claim(places: Places) -> Network:
    """Claim a subnet that is not used by another cluster on this machine. The cluster's folder records the subnet."""
    with locked(clusters_directory() / "subnets.lock"):
        places.directory.mkdir(parents=True, exist_ok=True)
        taken = {int(file.read_text()) for file in clusters_directory().glob("*/subnet")} | set(_in_use())
        free = [number for number in _SUBNETS if number not in taken]
        if not free:
            raise ClusterError("Every subnet of 10.213.0.0/16 is in use: take down a test cluster first.")
        (places.directory / "subnet").write_text(str(free[0]))
    return Network(places.name, free[0])


def claimed(places: Places) -> Network | None:
    """Return the network of a fully or partly running cluster, or None if the cluster has no network."""
    with contextlib.suppress(FileNotFoundError):
        return Network(places.name, int((places.directory / "subnet").read_text()))
    return None


def _in_use() -> Iterator[int]:
    for link in json.loads(run("ip", "-json", "address")):
        for address in link["addr_info"]:
            parts = address["local"].split(".")
            if parts[:2] == ["10", "213"]:
                yield int(parts[2])
