"""The kernel's rules that enforce NetworkPolicies, as a table for nft.

Each connection is checked once, at the beginning: first against the sender's policies, then against the receiver's
policies. When a connection is checked, the address of a Service has already been replaced by the address of a pod.
Every node has the table with the rules for all pods. Connections from a node to pods on the same node are not checked.
Every Kubernetes allows connections from a node to its pods. For example, DNS and the ingress run as processes of a
node.
"""

from __future__ import annotations

from collections.abc import Iterator

from testcluster.policies.isolation import Allowed, Block, Direction, Pod, Ports, World, allowed

TABLE = "tinsmith_policies"
_OWN: dict[Direction, str] = {"egress": "saddr", "ingress": "daddr"}
_OTHER: dict[Direction, str] = {"egress": "daddr", "ingress": "saddr"}
# The sender gets an error at once: no route to the host. A closed port gives another error.
_REFUSE = "reject with icmp admin-prohibited"
_HOOKS = "\n".join(
    f"  chain {hook} {{\n    type filter hook {hook} priority filter - 1; policy accept;\n    jump judged\n  }}"
    for hook in ("forward", "input")
)


def table(world: World) -> str:
    """Return the rules. The new rules replace the previous rules atomically."""
    chains, dispatch = [], ["    ct state established,related return"]
    for direction, own in _OWN.items():
        isolated = [(pod, found) for pod in world.pods if (found := allowed(pod, direction, world)) is not None]
        chains += [_chain(pod, direction, found) for pod, found in isolated]
        if isolated:
            jumps = ", ".join(f"{pod.address} : jump {_name(pod, direction)}" for pod, _ in isolated)
            dispatch.append(f"    ip {own} vmap {{ {jumps} }}")
    judged = "\n".join(["  chain judged {", *dispatch, "  }"])
    body = "\n".join([*chains, judged, _HOOKS])
    return f"add table ip {TABLE}\ndelete table ip {TABLE}\ntable ip {TABLE} {{\n{body}\n}}\n"


def _name(pod: Pod, direction: Direction) -> str:
    return f"{direction}_{pod.address.replace('.', '_')}"


def _chain(pod: Pod, direction: Direction, found: list[Allowed]) -> str:
    """Return the chain of rules for one direction. A connection from a pod to itself is never blocked."""
    to_itself = f"ip {_OTHER[direction]} {pod.address}"
    let_through = [to_itself, *(match for one in found for match in _matches(one, direction))]
    lines = [*(f"{' '.join([match, 'return']).strip()}" for match in dict.fromkeys(let_through)), _REFUSE]
    return "\n".join([f"  chain {_name(pod, direction)} {{", *(f"    {line}" for line in lines), "  }"])


def _matches(one: Allowed, direction: Direction) -> Iterator[str]:
    peers = [""] if one.peers is None else list(_peers(one.peers, _OTHER[direction]))
    ports = [""] if one.ports is None else [_ports(ports) for ports in one.ports]
    for peer in peers:
        for port in ports:
            yield f"{peer} {port}".strip()


def _peers(peers: tuple[str | Block, ...], side: str) -> Iterator[str]:
    """Return one set of all single addresses, and one item for each range, because ranges in a set must not overlap."""
    if addresses := sorted({peer for peer in peers if isinstance(peer, str)}):
        yield f"ip {side} {{ {', '.join(addresses)} }}"
    for block in peers:
        if isinstance(block, Block):
            yield " ".join([f"ip {side} {block.cidr}", *(f"ip {side} != {cidr}" for cidr in block.excepted)])


def _ports(ports: Ports) -> str:
    protocol = ports.protocol.lower()
    if ports.first is None:
        return f"meta l4proto {protocol}"
    return f"{protocol} dport {ports.first}" + ("" if ports.last == ports.first else f"-{ports.last}")
