"""The effect of NetworkPolicies on one pod: the connections that the pod may make and accept.

All functions are pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address, ip_network
from typing import Any, Literal

Document = dict[str, Any]
Direction = Literal["ingress", "egress"]
_PEERS: dict[Direction, str] = {"ingress": "from", "egress": "to"}
_TYPES: dict[Direction, str] = {"ingress": "Ingress", "egress": "Egress"}


@dataclass(frozen=True)
class Pod:
    """A pod with an address in the pod network. `ports`: the named ports, by name and protocol."""

    namespace: str
    labels: Mapping[str, str]
    address: str
    ports: Mapping[tuple[str, str], int]


@dataclass(frozen=True)
class World:
    """The pods, policies and namespaces of the cluster. `namespaces`: the labels of each namespace, by name."""

    policies: Sequence[Document]
    namespaces: Mapping[str, Mapping[str, str]]
    pods: Sequence[Pod]


@dataclass(frozen=True)
class Block:
    """A range of addresses, without the ranges in `excepted`."""

    cidr: str
    excepted: tuple[str, ...] = ()


@dataclass(frozen=True)
class Ports:
    """The ports from `first` to `last`. If `first` is None, the range contains every port of the protocol."""

    protocol: str
    first: int | None = None
    last: int | None = None


@dataclass(frozen=True)
class Allowed:
    """A permitted kind of connection. The value None means any peer, or any port and protocol."""

    peers: tuple[str | Block, ...] | None
    ports: tuple[Ports, ...] | None


def described(pod: Document, address: str) -> Pod:
    """Convert a pod of the Kubernetes API into a pod for the rules."""
    containers = [*pod["spec"]["containers"], *pod["spec"].get("initContainers", [])]
    ports = {
        (port["name"], port.get("protocol", "TCP")): port["containerPort"]
        for container in containers
        for port in container.get("ports", [])
        if "name" in port
    }
    metadata = pod["metadata"]
    return Pod(metadata["namespace"], metadata.get("labels", {}), address, ports)


def allowed(pod: Pod, direction: Direction, world: World) -> list[Allowed] | None:
    """Return the connections that the pod may make or accept. For a pod that no policy selects, return None."""
    about = [policy for policy in world.policies if _is_about(policy, pod, direction)]
    if not about:
        return None
    return [
        found
        for policy in about
        for rule in policy["spec"].get(direction) or []
        for found in _of_rule(rule, pod, direction, policy["metadata"]["namespace"], world)
    ]


def _is_about(policy: Document, pod: Pod, direction: Direction) -> bool:
    """Return whether the policy selects the pod in this direction. The API server always sets the types of a policy."""
    return (
        policy["metadata"]["namespace"] == pod.namespace
        and _TYPES[direction] in policy["spec"]["policyTypes"]
        and selects(policy["spec"].get("podSelector") or {}, pod.labels)
    )


def _of_rule(rule: Document, pod: Pod, direction: Direction, namespace: str, world: World) -> Iterator[Allowed]:
    sources = rule.get(_PEERS[direction]) or None
    pods = _selected(sources, namespace, world)
    peers = None if sources is None else _peers(pods, sources)
    if not rule.get("ports"):
        yield Allowed(peers, None)
        return
    named = [port for port in rule["ports"] if isinstance(port.get("port"), str)]
    if numbered := tuple(_numbered(port) for port in rule["ports"] if port not in named):
        yield Allowed(peers, numbered)
    # The name refers to a port of the receiver.
    if direction == "ingress" and (found := tuple(_looked_up(named, pod))):
        yield Allowed(peers, found)
    if direction == "egress":
        for peer in pods if sources is None else [*pods, *_in_blocks(sources, world)]:
            if found := tuple(_looked_up(named, peer)):
                yield Allowed((peer.address,), found)


def _selected(sources: list[Document] | None, namespace: str, world: World) -> list[Pod]:
    """Return the pods that match the peers of a rule. If the rule names no peers, return all pods."""
    if sources is None:
        return list(world.pods)
    return [pod for pod in world.pods if any(_is_peer(source, pod, namespace, world) for source in sources)]


def _is_peer(source: Document, pod: Pod, namespace: str, world: World) -> bool:
    if "ipBlock" in source:
        return False
    if (spaces := source.get("namespaceSelector")) is None:
        is_there = pod.namespace == namespace
    else:
        is_there = selects(spaces, world.namespaces.get(pod.namespace, {}))
    return is_there and selects(source.get("podSelector") or {}, pod.labels)


def _peers(pods: list[Pod], sources: list[Document]) -> tuple[str | Block, ...]:
    addresses: list[str | Block] = [pod.address for pod in pods]
    return (*addresses, *_blocks(sources))


def _in_blocks(sources: list[Document], world: World) -> list[Pod]:
    return [pod for pod in world.pods if any(_holds(block, pod.address) for block in _blocks(sources))]


def _holds(block: Block, address: str) -> bool:
    within = [ip_address(address) in ip_network(cidr) for cidr in (block.cidr, *block.excepted)]
    return within[0] and not any(within[1:])


def _blocks(sources: list[Document]) -> Iterator[Block]:
    """Yield the blocks of IPv4 addresses. Pods have only IPv4 addresses."""
    for block in (source["ipBlock"] for source in sources if "ipBlock" in source):
        if ":" not in block["cidr"]:
            yield Block(block["cidr"], tuple(block.get("except") or ()))


def _numbered(port: Document) -> Ports:
    first = port.get("port")
    return Ports(port.get("protocol", "TCP"), first, port.get("endPort", first))


def _looked_up(named: list[Document], pod: Pod) -> Iterator[Ports]:
    for port in named:
        protocol = port.get("protocol", "TCP")
        if (number := pod.ports.get((port["port"], protocol))) is not None:
            yield Ports(protocol, number, number)


def selects(selector: Document, labels: Mapping[str, str]) -> bool:
    """Return whether the selector matches the labels. An empty selector matches everything."""
    wanted = selector.get("matchLabels") or {}
    return all(labels.get(key) == value for key, value in wanted.items()) and all(
        _meets(expression, labels) for expression in selector.get("matchExpressions") or []
    )


def _meets(expression: Document, labels: Mapping[str, str]) -> bool:
    key, values = expression["key"], expression.get("values") or []
    match expression["operator"]:
        case "In":
            return labels.get(key) in values
        case "NotIn":
            return labels.get(key) not in values
        case "Exists":
            return key in labels
        case "DoesNotExist":
            return key not in labels
    raise ValueError(f"{expression['operator']} is no operator of a selector")
