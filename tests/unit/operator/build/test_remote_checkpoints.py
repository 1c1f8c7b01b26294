"""A worker's access to a checkpoint root that is not a volume."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.operator.built_sessions import REMOTE
from support.operator.resources import FROM_HUB, make_pool, make_session
from tinsmith_operator.api.owner import Owner
from tinsmith_operator.build.network import build_policy
from tinsmith_operator.build.pod import installation_variables
from tinsmith_operator.installation import Installation

KEYED = replace(REMOTE, checkpoint_secret="store")
LOCAL = replace(REMOTE, checkpoint_root="file:///checkpoints")
ENVIRONMENT = {"AWS_REGION": "eu-north-1", "AWS_ENDPOINT_URL_S3": "https://store.example.com:9000"}


def ports(owner: Owner, installation: Installation) -> set[int]:
    egress = build_policy(owner, installation)["spec"]["egress"]
    return {port["port"] for rule in egress for port in rule["ports"]}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, {53, 443}),
        ({"AWS_REGION": "eu-north-1"}, {53, 443}),
        ({"AWS_ENDPOINT_URL_S3": "https://store.example.com"}, {53, 443}),
        ({"AWS_ENDPOINT_URL_S3": "http://store.example.com"}, {53, 80}),
        ({"AWS_ENDPOINT_URL_S3": "http://store.example.com:9000/"}, {53, 9000}),
        ({"AWS_ENDPOINT_URL": "http://[fd00::1]:9001"}, {53, 9001}),
        ({"AWS_ENDPOINT_URL": "http://a:1", "AWS_ENDPOINT_URL_S3": "http://b:2"}, {53, 2}),
    ],
    ids=str,
)
def test_the_policy_opens_the_port_of_the_store(environment: dict[str, str], expected: set[int]) -> None:
    assert ports(make_session(), replace(KEYED, checkpoint_environment=environment)) == expected


def test_a_worker_with_traces_has_the_collector_and_may_reach_its_port() -> None:
    installation = replace(LOCAL, tracing_endpoint="http://collector.monitoring:4318")
    assert ports(make_session(), installation) == {53, 4318}
    variable = {"name": "OTEL_EXPORTER_OTLP_ENDPOINT", "value": "http://collector.monitoring:4318"}
    assert installation_variables(installation, []) == [variable]
    assert installation_variables(installation, [{**variable, "value": "http://own:4318"}]) == []


def test_a_model_from_the_hub_can_be_fetched_with_a_checkpoint_store_of_the_user() -> None:
    installation = replace(KEYED, checkpoint_environment=ENVIRONMENT)
    assert ports(make_session(source=FROM_HUB), installation) == {53, 443, 9000}


def cidrs(owner: Owner, installation: Installation) -> dict[str, set[int]]:
    """Return the opened addresses, other than any, and their ports."""
    egress = build_policy(owner, installation)["spec"]["egress"]
    return {
        peer["ipBlock"]["cidr"]: {port["port"] for port in rule["ports"]}
        for rule in egress
        for peer in rule.get("to", [])
    }


@pytest.mark.parametrize("owner", [make_session(), make_pool()], ids=["session", "pool"])
def test_without_keys_the_pod_may_ask_its_node_and_the_cloud_for_credentials(owner: Owner) -> None:
    """Without a key the pod has the rights of its node or its ServiceAccount."""
    installation = replace(REMOTE, checkpoint_environment={"AWS_ENDPOINT_URL_S3": "https://store.example.com:9000"})
    assert cidrs(owner, installation) == {"169.254.169.254/32": {80}, "169.254.170.23/32": {80}}
    assert ports(owner, installation) == {53, 80, 443, 9000}


def test_a_pod_with_keys_of_a_secret_cannot_reach_the_credentials_of_the_node() -> None:
    assert cidrs(make_session(), KEYED) == {}
