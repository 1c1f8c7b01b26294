"""The network policies of operator and API server, in both directions."""

from __future__ import annotations

import pytest
from support.kubernetes.charts import Object, at, merged, named, render
from tinsmith_operator.build.network import CREDENTIAL_SERVERS

DATABASE = at("apiServer.database.existingSecret.name", "postgresql")
REMOTE = at("checkpoints.remote", {"url": "s3://bucket", "secretName": "object-store"})
ALWAYS = {53, 443, 6443, 7443}


def policy(values: Object, component: str) -> Object:
    found: Object = named(render(values), "NetworkPolicy", f"tinsmith-{component}")["spec"]
    return found


def ports_out(values: Object) -> set[int]:
    return {port["port"] for rule in policy(values, "api-server")["egress"] for port in rule["ports"]}


def endpoint(**variables: str) -> Object:
    return merged(REMOTE, at("checkpoints.remote.environment", variables))


@pytest.mark.parametrize(
    ("values", "more"),
    [
        pytest.param({}, set(), id="nothing"),
        pytest.param(DATABASE, {5432}, id="database"),
        pytest.param(merged(DATABASE, at("networkPolicy.databasePorts", [6432])), {6432}, id="pooler"),
        pytest.param(REMOTE, set(), id="S3, by https"),
        pytest.param(endpoint(AWS_ENDPOINT_URL_S3="https://objects.example.com:9000/"), {9000}, id="endpoint"),
        pytest.param(endpoint(AWS_ENDPOINT_URL="http://minio.storage.svc"), {80}, id="endpoint, by http"),
        pytest.param(
            endpoint(AWS_ENDPOINT_URL="http://all", AWS_ENDPOINT_URL_S3="http://s3:9000"), {9000}, id="one for S3 alone"
        ),
        pytest.param(endpoint(AWS_ENDPOINT_URL_S3="https://[2001:db8::1]:9443"), {9443}, id="endpoint, by address"),
        pytest.param(at("tracing.endpoint", "http://collector.monitoring:4318"), {4318}, id="collector"),
        pytest.param(at("networkPolicy.extraEgress", [{"ports": [{"port": 3128}]}]), {3128}, id="proxy"),
    ],
)
def test_the_api_server_reaches_only_the_ports_of_its_configured_services(values: Object, more: set[int]) -> None:
    assert ports_out(values) == ALWAYS | more


def test_credentials_of_the_node_or_the_account_are_fetched_where_they_are_and_only_if_no_secret_is_named() -> None:
    values = merged(endpoint(AWS_ENDPOINT_URL_S3="https://s3:9000"), at("networkPolicy.kubernetesApiPorts", [6443]))
    assert links(values) == set()
    assert 443 not in ports_out(values)
    without = merged(values, at("checkpoints.remote.secretName", ""))
    # As the operator lets workers and samplers.
    assert links(without) == {(cidr, 80) for cidr in CREDENTIAL_SERVERS}
    assert ports_out(without) - ports_out(values) == {80, 443}


def links(values: Object) -> set[tuple[str, int]]:
    """Return the admitted addresses, each with its port."""
    return {
        (peer["ipBlock"]["cidr"], port["port"])
        for rule in policy(values, "api-server")["egress"]
        for peer in rule.get("to", [])
        for port in rule["ports"]
        if "ipBlock" in peer
    }


def worker_peer(values: Object, component: str) -> Object:
    [rule] = [rule for rule in policy(values, component)["egress"] if rule["ports"][0]["port"] == 7443]
    [peer] = rule["to"]
    found: Object = peer
    return found


def names(component: str) -> list[str]:
    [expression] = worker_peer({}, component)["podSelector"]["matchExpressions"]
    assert (expression["key"], expression["operator"]) == ("app.kubernetes.io/name", "In")
    found: list[str] = expression["values"]
    return found


def test_api_servers_and_operators_reach_workers_and_samplers() -> None:
    assert names("api-server") == ["tinsmith-worker", "tinsmith-sampler"]
    assert names("operator") == ["tinsmith-worker", "tinsmith-sampler"]


@pytest.mark.parametrize("component", ["operator", "api-server"])
def test_workers_are_reached_in_the_namespaces_of_the_scope(component: str) -> None:
    def selected(scope: Object) -> Object | None:
        found: Object | None = worker_peer(merged(REMOTE, {"scope": scope}), component).get("namespaceSelector")
        return found

    # Without a selector of namespaces, a rule is about its policy's own.
    assert selected({}) is None
    assert selected({"cluster": True}) == {}
    named_ones = {"key": "kubernetes.io/metadata.name", "operator": "In", "values": ["team-a", "team-b"]}
    assert selected({"namespaces": ["team-a", "team-b"]}) == {"matchExpressions": [named_ones]}


def test_clients_that_are_named_keep_others_out_but_not_the_test_of_helm() -> None:
    open_to_all, metrics = policy({}, "api-server")["ingress"]
    assert "from" not in open_to_all
    assert metrics == {"ports": [{"port": "metrics", "protocol": "TCP"}]}
    peer = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "ingress-nginx"}}}
    rule, still_metrics = policy(at("networkPolicy.clients", [peer]), "api-server")["ingress"]
    assert still_metrics == metrics
    named_peer, test_peer = rule["from"]
    assert named_peer == peer
    labels = named(render({}), "Pod", "tinsmith-test-step")["metadata"]["labels"]
    assert test_peer["podSelector"]["matchLabels"].items() <= labels.items()


def test_only_keda_reaches_the_port_for_autoscaling_and_only_where_it_is_enabled() -> None:
    values = at("apiServer.autoscaling.enabled", True)
    *_, rule = policy(values, "api-server")["ingress"]
    keda = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "keda"}}}
    assert rule == {"from": [keda], "ports": [{"port": "scaler", "protocol": "TCP"}]}
    peer = {"podSelector": {"matchLabels": {"app": "keda-operator"}}}
    *_, chosen = policy(merged(values, at("networkPolicy.scalers", [peer])), "api-server")["ingress"]
    assert chosen["from"] == [peer]
    assert not any(each["metadata"]["name"].endswith("-scaler") for each in render({}))
