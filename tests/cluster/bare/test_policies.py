"""The enforcement of NetworkPolicies: connections that no policy allows fail."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from support.kubernetes.fixtures import Cluster
from support.kubernetes.hello import PORT, hello_pod, load_hello
from testcluster.errors import ClusterError

SERVER, FRIEND, STRANGER, FAR = "server", "friend", "stranger", "far"
IN_FORCE_SECONDS = 30.0
NO_ROUTE = "no route to host"
ALL_PODS = "10.244.0.0/16"


@dataclass(frozen=True)
class Neighbours:
    """Pods of two namespaces: `far` is in the other."""

    cluster: Cluster
    home: str
    elsewhere: str
    addresses: dict[str, str]

    def kubectl(self, *words: str, stdin: str | None = None) -> str:
        return self.cluster.kubectl(f"--namespace={self.home}", *words, stdin=stdin)

    def reaches(self, asking: str) -> bool:
        """Return true if the pod gets an answer of the server instead of "no route"."""
        namespace = self.elsewhere if asking == FAR else self.home
        url = f"http://{self.addresses[SERVER]}:{PORT}"
        try:
            self.cluster.kubectl(f"--namespace={namespace}", "exec", asking, "--", "/hello", "get", url)
        except ClusterError as error:
            if NO_ROUTE not in str(error):
                raise
            return False
        return True

    def wait_kept_out(self, asking: str) -> None:
        deadline = time.monotonic() + IN_FORCE_SECONDS
        while self.reaches(asking):
            assert time.monotonic() < deadline, f"{asking} still reaches the server"

    def wait_let_in(self, asking: str) -> None:
        deadline = time.monotonic() + IN_FORCE_SECONDS
        while not self.reaches(asking):
            assert time.monotonic() < deadline, f"{asking} does not reach the server"


@pytest.fixture(scope="module")
def neighbours(node_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Neighbours]:
    load_hello(node_cluster, tmp_path_factory.mktemp("hello"))
    home, elsewhere = (f"policies-{uuid.uuid4().hex[:8]}" for _ in range(2))
    addresses: dict[str, str] = {}
    for namespace, pods in ((home, [SERVER, FRIEND, STRANGER]), (elsewhere, [FAR])):
        node_cluster.make_namespace(namespace)
        manifests = "\n".join(json.dumps(hello_pod(pod, {"app": pod})) for pod in pods)
        inside = f"--namespace={namespace}"
        node_cluster.kubectl(inside, "apply", "--filename=-", stdin=manifests)
        node_cluster.kubectl(inside, "wait", "pods", "--all", "--for=condition=Ready", "--timeout=120s")
        listed = "--output=jsonpath={range .items[*]}{.metadata.name} {.status.podIP}{'\\n'}{end}"
        addresses |= dict(line.split() for line in node_cluster.kubectl(inside, "get", "pods", listed).splitlines())
    yield Neighbours(node_cluster, home, elsewhere, addresses)
    for namespace in (home, elsewhere):
        # The end of a namespace looks for what is left of its pods after some seconds only.
        node_cluster.kubectl(f"--namespace={namespace}", "delete", "pods", "--all", "--grace-period=0", "--force")
        node_cluster.delete_namespace(namespace)


def selected(app: str) -> dict[str, Any]:
    return {"podSelector": {"matchLabels": {"app": app}}}


def about(app: str, direction: str, *rules: dict[str, Any]) -> dict[str, Any]:
    """Return the spec of a policy with these rules."""
    return {**selected(app), "policyTypes": [direction.capitalize()], direction: list(rules)}


def not_to(address: str) -> dict[str, Any]:
    return {"to": [{"ipBlock": {"cidr": ALL_PODS, "except": [f"{address}/32"]}}]}


@pytest.fixture
def policy(neighbours: Neighbours) -> Iterator[Any]:
    def apply(spec: dict[str, Any]) -> None:
        document = {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": {"name": "tried"}}
        neighbours.kubectl("apply", "--filename=-", stdin=json.dumps({**document, "spec": spec}))

    yield apply
    neighbours.kubectl("delete", "networkpolicy", "tried")


@pytest.mark.parametrize(
    ("peers", "let_in"), [([selected(FRIEND)], FRIEND), ([{"namespaceSelector": {}, **selected(FAR)}], FAR)]
)
def test_only_allowed_clients_reach_a_pod(
    peers: list[dict[str, Any]], let_in: str, neighbours: Neighbours, policy: Any
) -> None:
    policy(about(SERVER, "ingress", {"from": peers, "ports": [{"port": "http"}]}))
    for pod in {FRIEND, STRANGER, FAR} - {let_in}:
        neighbours.wait_kept_out(pod)
    assert neighbours.reaches(let_in)
    # The node's kubelet is always let in.
    neighbours.kubectl("wait", f"pod/{SERVER}", "--for=condition=Ready", "--timeout=5s")


def test_a_pod_reaches_the_ports_that_it_may(neighbours: Neighbours, policy: Any) -> None:
    def to_the_server(*ports: dict[str, Any]) -> dict[str, Any]:
        return about(STRANGER, "egress", {"to": [selected(SERVER)], "ports": list(ports)})

    policy(to_the_server({"port": PORT, "protocol": "UDP"}, {"port": PORT + 1}, {"port": "metrics"}))
    neighbours.wait_kept_out(STRANGER)
    policy(to_the_server({"port": PORT - 1, "endPort": PORT + 1}))
    neighbours.wait_let_in(STRANGER)


def test_a_block_of_addresses_is_open_but_for_its_exceptions(neighbours: Neighbours, policy: Any) -> None:
    policy(about(STRANGER, "egress", not_to(neighbours.addresses[SERVER])))
    neighbours.wait_kept_out(STRANGER)
    url = f"http://{neighbours.addresses[FAR]}:{PORT}"
    assert neighbours.kubectl("exec", STRANGER, "--", "/hello", "get", url) == f"{FAR}\n"


def test_a_pod_that_starts_is_isolated_before_it_runs(neighbours: Neighbours, policy: Any) -> None:
    policy(about("late", "egress"))
    late = hello_pod("late", {"app": "late"})
    late["spec"]["restartPolicy"] = "Never"
    late["spec"]["containers"][0] |= {"args": ["get", f"http://{neighbours.addresses[SERVER]}:{PORT}"]}
    del late["spec"]["containers"][0]["readinessProbe"]
    neighbours.kubectl("apply", "--filename=-", stdin=json.dumps(late))
    neighbours.kubectl("wait", "pod/late", "--for=jsonpath={.status.phase}=Failed", "--timeout=60s")
    assert NO_ROUTE in neighbours.kubectl("logs", "late")
    neighbours.kubectl("delete", "pod", "late")
