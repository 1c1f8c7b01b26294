"""The rules that the kernel is given let through what NetworkPolicies say, and nothing else."""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping
from functools import cache
from ipaddress import ip_address, ip_network
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from testcluster.policies.enforcer import KINDS, NAMESPACES, PODS, POLICIES, Enforcer
from testcluster.policies.isolation import Pod, World, described
from testcluster.policies.rules import table

Document = dict[str, Any]
PROTOCOLS = ("TCP", "UDP")
NUMBERS = (53, 80, 7443)
SPACES = {"a": {"kubernetes.io/metadata.name": "a", "team": "x"}, "b": {"kubernetes.io/metadata.name": "b"}}


# ---- what the words of a NetworkPolicy mean, connection by connection


def may(sender: Pod, receiver: Pod, protocol: str, number: int, world: World) -> bool:
    if sender == receiver:
        return True
    return all(
        side(own, other, receiver, (protocol, number), direction, world)
        for own, other, direction in ((sender, receiver, "egress"), (receiver, sender, "ingress"))
    )


def side(own: Pod, other: Pod, receiver: Pod, target_port: tuple[str, int], direction: str, world: World) -> bool:
    about = [
        policy
        for policy in world.policies
        if policy["metadata"]["namespace"] == own.namespace
        and direction.capitalize() in policy["spec"]["policyTypes"]
        and chosen(policy["spec"]["podSelector"], own.labels)
    ]
    rules = [(policy, rule) for policy in about for rule in policy["spec"].get(direction, [])]
    return not about or any(
        has_peer(rule.get("from" if direction == "ingress" else "to"), other, policy["metadata"]["namespace"])
        and has_port(rule.get("ports"), receiver, *target_port)
        for policy, rule in rules
    )


def has_peer(peers: list[Document] | None, other: Pod, namespace: str) -> bool:
    def is_one(peer: Document) -> bool:
        if block := peer.get("ipBlock"):
            return within(other.address, block["cidr"]) and not any(
                within(other.address, cidr) for cidr in block.get("except", [])
            )
        spaces = peer.get("namespaceSelector")
        there = other.namespace == namespace if spaces is None else chosen(spaces, SPACES[other.namespace])
        return there and chosen(peer.get("podSelector", {}), other.labels)

    return not peers or any(is_one(peer) for peer in peers)


def has_port(ports: list[Document] | None, receiver: Pod, protocol: str, number: int) -> bool:
    def is_one(port: Document) -> bool:
        if port.get("protocol", "TCP") != protocol:
            return False
        first = port.get("port")
        if isinstance(first, str):
            return receiver.ports.get((first, protocol)) == number
        return first is None or first <= number <= port.get("endPort", first)

    return not ports or any(is_one(port) for port in ports)


def chosen(selector: Document, labels: Mapping[str, str]) -> bool:
    meaning = {
        "In": lambda value, values: value in values,
        "NotIn": lambda value, values: value not in values,
        "Exists": lambda value, values: value is not None,
        "DoesNotExist": lambda value, values: value is None,
    }
    return all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items()) and all(
        meaning[one["operator"]](labels.get(one["key"]), one.get("values"))
        for one in selector.get("matchExpressions", [])
    )


@cache
def within(address: str, cidr: str) -> bool:
    return ip_address(address) in ip_network(cidr)


# ---- what the kernel does by the rules


def read(rules: str) -> dict[str, list[str]]:
    return {
        name: [line.strip() for line in body.strip().splitlines()]
        for name, body in re.findall(r"chain (\w+) \{\n(.*?)\n  \}", rules, re.DOTALL)
    }


def passes(chains: dict[str, list[str]], sender: str, receiver: str, protocol: str, number: int) -> bool:
    packet = {"saddr": sender, "daddr": receiver}
    for line in chains["judged"][1:]:
        field, jumps = re.fullmatch(r"ip (\w+) vmap \{ (.*) \}", line).groups()  # type: ignore[union-attr]
        targets = dict(jump.split(" : jump ") for jump in jumps.split(", "))
        if (chain := targets.get(packet[field])) and not returns(chains[chain], packet, protocol, number):
            return False
    return True


def returns(chain: list[str], packet: dict[str, str], protocol: str, number: int) -> bool:
    """Return whether the packet leaves the chain instead of being refused at its end."""
    *rules, refusal = chain
    assert refusal.startswith("reject")
    return any(matches(rule.removesuffix("return").strip(), packet, protocol, number) for rule in rules)


def matches(rule: str, packet: dict[str, str], protocol: str, number: int) -> bool:
    for words in re.findall(r"ip \w+ (?:!= )?(?:\{[^}]*\}|\S+)|\w+ dport \S+|meta l4proto \w+", rule):
        kind, field, *rest = words.split(" ", 2)
        if kind == "ip":
            negated = rest[0].startswith("!= ")
            ranges = rest[0].removeprefix("!= ").strip("{} ").split(", ")
            if any(within(packet[field], one) for one in ranges) == negated:
                return False
        elif kind == "meta":
            if rest[0] != protocol.lower():
                return False
        else:
            first, _, last = rest[0].partition("-")
            if kind != protocol.lower() or not int(first) <= number <= int(last or first):
                return False
    return True


# ---- worlds

PODS_OF_ALL_KINDS = [
    Pod("a", {"app": "x"}, "10.244.1.1", {("rpc", "TCP"): 7443}),
    Pod("a", {"app": "y", "tier": "x"}, "10.244.1.2", {("dns", "UDP"): 53, ("rpc", "TCP"): 80}),
    Pod("b", {}, "10.244.1.3", {("dns", "TCP"): 53}),
    Pod("b", {"app": "x"}, "10.244.2.4", {}),
]
CONNECTIONS = [
    (sender, receiver, protocol, number)
    for sender, receiver in product(PODS_OF_ALL_KINDS, repeat=2)
    for protocol in PROTOCOLS
    for number in NUMBERS
]
SELECTORS: list[Document] = [
    {},
    {"matchLabels": {"app": "x"}},
    {"matchLabels": {"app": "y", "tier": "x"}},
    {"matchExpressions": [{"key": "app", "operator": "In", "values": ["x", "y"]}]},
    {"matchExpressions": [{"key": "app", "operator": "NotIn", "values": ["x"]}]},
    {"matchExpressions": [{"key": "tier", "operator": "Exists"}]},
    {"matchExpressions": [{"key": "app", "operator": "DoesNotExist"}]},
]
TEAM: Document = {"matchExpressions": [{"key": "team", "operator": "Exists"}]}
PEERS: list[Document] = [
    *({"podSelector": selector} for selector in SELECTORS),
    {"namespaceSelector": {}},
    {"namespaceSelector": TEAM},
    {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "b"}}, "podSelector": SELECTORS[1]},
    {"ipBlock": {"cidr": "0.0.0.0/0"}},
    {"ipBlock": {"cidr": "10.244.1.0/24", "except": ["10.244.1.1/32", "10.244.1.2/31"]}},
    {"ipBlock": {"cidr": "10.244.0.0/16", "except": ["10.244.1.0/30"]}},
    {"ipBlock": {"cidr": "192.0.2.0/24"}},
]
PORTS: list[Document] = [
    {"protocol": "TCP"},
    {"protocol": "UDP"},
    {"port": 80},
    {"protocol": "UDP", "port": 53},
    {"port": 60, "endPort": 90},
    {"port": 53, "endPort": 7443},
    {"port": "rpc"},
    {"protocol": "UDP", "port": "dns"},
    {"port": "unknown"},
]
SIDES = {"ingress": "from", "egress": "to"}


def policy(namespace: str, selector: Document, direction: str, rules: list[Document]) -> Document:
    spec = {"podSelector": selector, "policyTypes": [direction.capitalize()], direction: rules}
    return {"metadata": {"namespace": namespace}, "spec": spec}


def assert_enforced(policies: list[Document]) -> None:
    world = World(policies, SPACES, PODS_OF_ALL_KINDS)
    chains = read(table(world))
    for sender, receiver, protocol, number in CONNECTIONS:
        let = passes(chains, sender.address, receiver.address, protocol, number)
        assert let == may(sender, receiver, protocol, number, world), (policies, sender, receiver, protocol, number)


@pytest.mark.parametrize("direction", SIDES)
@pytest.mark.parametrize("peer", [None, *PEERS], ids=str)
def test_each_kind_of_peer_and_of_port_is_let_through_and_no_other(peer: Document | None, direction: str) -> None:
    for port in (None, *PORTS):
        rule = {} if peer is None else {SIDES[direction]: [peer]}
        rule |= {} if port is None else {"ports": [port]}
        assert_enforced([policy("a", {}, direction, [rule])])


@pytest.mark.parametrize("direction", SIDES)
@pytest.mark.parametrize("selector", SELECTORS, ids=str)
def test_a_policy_without_rules_isolates_the_pods_of_its_namespace_that_it_selects(
    selector: Document, direction: str
) -> None:
    assert_enforced([policy("a", selector, direction, [])])


@st.composite
def any_policy(draw: st.DrawFn) -> Document:
    direction = draw(st.sampled_from(sorted(SIDES)))
    some_peers, some_ports = (st.lists(st.sampled_from(kinds), max_size=3) for kinds in (PEERS, PORTS))
    rule = st.fixed_dictionaries({}, optional={SIDES[direction]: some_peers, "ports": some_ports})
    rules = draw(st.lists(rule, max_size=2))
    return policy(draw(st.sampled_from(sorted(SPACES))), draw(st.sampled_from(SELECTORS)), direction, rules)


@settings(max_examples=50)
@given(st.lists(any_policy(), max_size=5))
def test_policies_add_up_and_both_ends_have_to_agree(policies: list[Document]) -> None:
    assert_enforced(policies)


def test_blocks_of_addresses_that_no_pod_has_are_left_out() -> None:
    rule = {"from": [{"ipBlock": {"cidr": "2001:db8::/32"}}]}
    spec = {"podSelector": {}, "policyTypes": ["Ingress"], "ingress": [rule]}
    world = World([{"metadata": {"namespace": "a"}, "spec": spec}], SPACES, [Pod("a", {}, "10.244.1.1", {})])
    assert "2001" not in table(world)
    assert not passes(read(table(world)), "192.0.2.1", "10.244.1.1", "TCP", 80)


def test_ports_have_their_names_from_all_containers() -> None:
    containers = [{"ports": [{"name": "rpc", "containerPort": 7443}]}, {"ports": [{"containerPort": 1}]}, {}]
    sidecars = [{"ports": [{"name": "dns", "containerPort": 53, "protocol": "UDP"}]}]
    spec = {"containers": containers, "initContainers": sidecars}
    pod = described({"metadata": {"namespace": "a"}, "spec": spec}, "10.244.1.1")
    assert pod.ports == {("rpc", "TCP"): 7443, ("dns", "UDP"): 53}


# ---- who keeps them


def pod(uid: str) -> Document:
    return {"metadata": {"uid": uid, "namespace": "a", "labels": {}}, "spec": {"containers": []}}


DENY = {"metadata": {"uid": "deny", "namespace": "a"}, "spec": {"podSelector": {}, "policyTypes": ["Ingress"]}}


@pytest.fixture
def put() -> list[str]:
    return []


@pytest.fixture
def enforcer(put: list[str]) -> Enforcer:
    """Return an enforcer of an empty cluster."""
    enforcer = Enforcer(put.append)
    for kind in KINDS:
        enforcer.listed(kind, [{"metadata": {"uid": "n", "name": "a"}}] if kind == NAMESPACES else [])
    return enforcer


def test_rules_follow_addresses_and_policies_and_are_put_in_force_only_where_they_change(
    enforcer: Enforcer, put: list[str]
) -> None:
    enforcer.seen(PODS, "ADDED", pod("p"))
    enforcer.seen(POLICIES, "ADDED", DENY)
    assert len(put) == 1
    enforcer.admit("sandbox", "p", "10.244.1.9")
    assert "10.244.1.9" in put[-1]
    enforcer.seen(PODS, "MODIFIED", {**pod("p"), "status": {"phase": "Running"}})
    assert len(put) == 2
    enforcer.seen(POLICIES, "DELETED", DENY)
    assert "10.244.1.9" not in put[-1]
    enforcer.seen(POLICIES, "ADDED", DENY)
    enforcer.release("sandbox")
    assert "10.244.1.9" not in put[-1]


def test_a_pod_waits_until_everything_about_it_is_known(put: list[str]) -> None:
    enforcer = Enforcer(put.append)
    started = threading.Thread(target=enforcer.admit, args=("sandbox", "p", "10.244.1.9"))
    started.start()
    enforcer.listed(PODS, [pod("p")])
    enforcer.listed(NAMESPACES, [])
    assert started.is_alive()
    assert put == []
    enforcer.listed(POLICIES, [DENY])
    started.join(30)
    assert "10.244.1.9" in put[-1]


def test_rules_that_could_not_be_put_in_force_are_tried_again() -> None:
    tried: list[str] = []

    def fail_at_first(rules: str) -> None:
        tried.append(rules)
        if len(tried) == 1:
            raise OSError("no nft")

    enforcer = Enforcer(fail_at_first)
    enforcer.listed(PODS, [])
    enforcer.listed(NAMESPACES, [])
    with pytest.raises(OSError, match="no nft"):
        enforcer.listed(POLICIES, [])
    enforcer.listed(POLICIES, [])
    assert tried[0] == tried[1]
