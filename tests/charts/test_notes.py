"""The notes that helm prints lead to the server and to its key."""

from __future__ import annotations

from base64 import b64decode

import pytest
from support.kubernetes.charts import Object, at, environment, merged, notes, pods, render

FIXED_KEY = "tml-a-key-that-stays-the-same"
ROUTE = at("apiServer.httpRoute", {"enabled": True, "parentRefs": [{"name": "gateway"}]})


@pytest.mark.parametrize(
    ("values", "url"),
    [
        pytest.param({}, "http://127.0.0.1:8000", id="port-forward"),
        pytest.param({"ingress": {"enabled": True}}, "http://ADDRESS", id="any host"),
        pytest.param({"ingress": {"enabled": True, "host": "t.example.com"}}, "http://t.example.com", id="host"),
        pytest.param(
            {"ingress": {"enabled": True, "host": "t.example.com", "tls": {"enabled": True}}},
            "https://t.example.com",
            id="https",
        ),
        pytest.param({"publicUrl": "https://api.example.com"}, "https://api.example.com", id="public URL"),
        pytest.param(ROUTE["apiServer"], "http://ADDRESS", id="a route for any host"),
        pytest.param(
            merged(ROUTE, at("apiServer.httpRoute.hostnames", ["t.example.com"]))["apiServer"],
            "http://t.example.com",
            id="a route for a host",
        ),
    ],
)
def test_the_notes_lead_to_the_server(values: Object, url: str) -> None:
    shown = notes({"apiServer": values})
    assert f"URL         {url}" in shown or f"from here: {url}" in shown
    assert f"export TINKER_BASE_URL={url} TINKER_API_KEY=tml-..." in shown


def test_the_notes_say_how_to_read_the_key() -> None:
    assert "get secret --namespace research tinsmith-api-key -o jsonpath='{.data.key}' | base64 -d" in notes({})
    assert "get secret --namespace research tinsmith-given-key -o" in notes({"keys": {"value": FIXED_KEY}})
    keys = {"existingSecret": {"name": "mine", "key": "api.key"}}
    assert r"get secret --namespace research mine -o jsonpath='{.data.api\.key}'" in notes({"keys": keys})


def test_a_configured_key_never_conflicts_with_the_key_of_the_operator() -> None:
    """The Secret of the first revision's chart goes, too, and a rollback makes it again."""
    made = environment(pods(render({}))["Deployment tinsmith-operator"])["TINSMITH_OPERATOR_FIRST_KEY_SECRET"]
    assert made == "tinsmith-api-key"
    objects = render(at("keys.value", FIXED_KEY))
    [given] = [each for each in objects if each["kind"] == "Secret"]
    assert given["metadata"]["name"] == "tinsmith-given-key"
    assert b64decode(given["data"]["key"]).decode() == FIXED_KEY
    for pod in ("Deployment tinsmith-api-server", "Pod tinsmith-test-step"):
        assert {"name": "tinsmith-given-key", "key": "key"} in secret_references(pods(objects)[pod])


def secret_references(pod: Object) -> list[Object]:
    variables = [variable for container in pod["containers"] for variable in container["env"]]
    return [found for each in variables if (found := each.get("valueFrom", {}).get("secretKeyRef"))]
