"""The schema is closed, every value has an effect, and what cannot work is refused before anything is installed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.kubernetes.charts import (
    CHART,
    ROOT,
    Object,
    at,
    lint,
    looked_up,
    merged,
    named,
    refusal,
    render,
)
from support.kubernetes.documents import Written, blocks_of_pages
from tinsmith_operator.build.pod import OWN_VARIABLES
from tinsmith_operator.installation import ENDPOINT_VARIABLES, remote_port

HERE = Path(__file__).parent
SCHEMA: Object = json.loads((CHART / "values.schema.json").read_text())
DEFAULTS: Object = yaml.safe_load((CHART / "values.yaml").read_text())
EXAMPLES = [
    yaml.safe_load(file.read_text())
    for file in (*sorted(HERE.glob("values/*.yaml")), ROOT / "examples" / "values-high-availability.yaml")
]
IN_PAGES = [
    each
    for each in blocks_of_pages()
    if each.where.startswith(("docs/how-to/chart.md", "docs/how-to/ingress.md")) and not each.is_manifest
]

FIXED_KEY = "tml-a-key-that-stays-the-same"
# The other values that a value needs to have an effect.
DATABASE = at("apiServer.database.existingSecret.name", "postgresql")
REMOTE = at("checkpoints.remote.url", "s3://bucket")
SCALED = at("apiServer.autoscaling.enabled", True)
ROUTE = at("apiServer.httpRoute", {"enabled": True, "parentRefs": [{"name": "gateway"}]})
ALERTS = at("monitoring", {"serviceMonitor": {"enabled": True}, "prometheusRule": {"enabled": True}})
NEEDED_WITH: dict[str, Object] = {
    "scope.namespaces": REMOTE,
    "scope.cluster": REMOTE,
    "operator.podDisruptionBudget.maxUnavailable": at("operator.replicas", 2),
    "apiServer.replicas": DATABASE,
    "apiServer.podDisruptionBudget.maxUnavailable": merged(DATABASE, at("apiServer.replicas", 2)),
    "apiServer.database.existingSecret.key": DATABASE,
    "apiServer.ingress.className": at("apiServer.ingress.enabled", True),
    "apiServer.ingress.host": at("apiServer.ingress.enabled", True),
    "apiServer.ingress.annotations": at("apiServer.ingress.enabled", True),
    "apiServer.ingress.tls.enabled": at("apiServer.ingress", {"enabled": True, "host": "example.com"}),
    "apiServer.ingress.tls.secretName": at(
        "apiServer.ingress", {"enabled": True, "host": "example.com", "tls": {"enabled": True}}
    ),
    "apiServer.httpRoute.enabled": at("apiServer.httpRoute.parentRefs", [{"name": "gateway"}]),
    "apiServer.httpRoute.parentRefs": ROUTE,
    "apiServer.httpRoute.hostnames": ROUTE,
    "apiServer.httpRoute.annotations": ROUTE,
    "apiServer.httpRoute.timeouts.requestSeconds": ROUTE,
    "apiServer.httpRoute.timeouts.backendRequestSeconds": ROUTE,
    "apiServer.autoscaling.tlsSecretName": SCALED,
    "networkPolicy.scalers": SCALED,
    "checkpoints.remote.environment": REMOTE,
    "checkpoints.remote.secretName": REMOTE,
    "keys.existingSecret.name": at("keys.value", ""),
    "keys.existingSecret.key": {"keys": {"value": "", "existingSecret": {"name": "mine"}}},
    "networkPolicy.databasePorts": DATABASE,
    "monitoring.serviceMonitor.labels": at("monitoring.serviceMonitor.enabled", True),
    "monitoring.serviceMonitor.interval": at("monitoring.serviceMonitor.enabled", True),
    "monitoring.prometheusRule.enabled": at("monitoring.serviceMonitor.enabled", True),
    "monitoring.prometheusRule.labels": ALERTS,
    "monitoring.prometheusRule.runbookUrl": ALERTS,
    "monitoring.dashboards.labels": at("monitoring.dashboards.enabled", True),
    "monitoring.dashboards.annotations": at("monitoring.dashboards.enabled", True),
}


def resolved(schema: Object) -> Object:
    if "$ref" not in schema:
        return schema
    return resolved(SCHEMA["definitions"][schema["$ref"].removeprefix("#/definitions/")])


def settable(schema: Object, defaults: Any, prefix: str = "") -> Iterator[str]:
    """Return the paths of the schema that values.yaml gives a value, and the optional members of empty ones."""
    for name, written in schema["properties"].items():
        member, path = resolved(written), f"{prefix}{name}"
        if path == "global":
            continue
        default = defaults.get(name) if isinstance(defaults, dict) else None
        belongs_to = "properties" in member and "affinity" not in path and "resources" not in path
        yield from settable(member, default, f"{path}.") if belongs_to else (path,)


PATHS = list(settable(SCHEMA, DEFAULTS))


def objects_of(schema: Any, where: str = "") -> Iterator[tuple[str, Object]]:
    """Every part of a schema that speaks of an object."""
    if isinstance(schema, list):
        for number, each in enumerate(schema):
            yield from objects_of(each, f"{where}[{number}]")
    elif isinstance(schema, dict):
        if schema.get("type") == "object":
            yield where, schema
        for name, each in schema.items():
            yield from objects_of(each, f"{where}.{name}")


@pytest.mark.parametrize("written", IN_PAGES, ids=lambda each: each.where)
def test_documented_values_are_accepted(written: Written) -> None:
    assert render(written.content)


# Kubernetes explains these, and its API server checks them.
OPEN = {".global", ".nodeAffinity", ".podAffinity", ".podAntiAffinity", ".affinity"}


def test_every_object_of_the_schema_is_closed_or_maps_names_to_one_type() -> None:
    loose = {
        where
        for where, schema in objects_of(SCHEMA)
        if schema.get("additionalProperties") in (None, True) and not any(where.endswith(name) for name in OPEN)
    }
    assert loose == set()


def test_values_and_schema_have_the_same_keys() -> None:
    missing: set[str] = set()
    unknown: set[str] = set()

    def compare(schema: Object, values: Object, prefix: str) -> None:
        named = schema["properties"]
        unknown.update(f"{prefix}{name}" for name in values.keys() - named.keys())
        missing.update(f"{prefix}{name}" for name in named.keys() - values.keys())
        for name, value in values.items():
            # What is empty by default is optional in each of its members.
            if isinstance(value, dict) and value and "properties" in resolved(named.get(name, {})):
                compare(resolved(named[name]), value, f"{prefix}{name}.")

    compare(SCHEMA, DEFAULTS, "")
    assert (missing, unknown) == ({"global"}, set())


def test_every_value_is_demanded() -> None:
    """Taken away by `null`, a list of ports would open all of them, and a setting would keep its program down."""
    lenient: set[str] = set()

    def compare(schema: Object, values: Object, prefix: str) -> None:
        lenient.update(f"{prefix}{name}" for name in values.keys() - set(schema["required"]))
        for name, value in values.items():
            # What several values share by reference, such as resources, is optional in each of its members.
            if isinstance(value, dict) and value and "properties" in schema["properties"][name]:
                compare(schema["properties"][name], value, f"{prefix}{name}.")

    compare(SCHEMA, DEFAULTS, "")
    assert lenient == set()


@pytest.mark.parametrize("path", ["networkPolicy.kubernetesApiPorts", "operator.logLevel", "image"])
def test_a_value_that_is_taken_away_is_refused_by_name(path: str) -> None:
    assert f"{path.rpartition('.')[2]} is required" in refusal(at(path, None))


def test_every_value_is_explained() -> None:
    chart, settings = (
        (CHART.parents[1] / "docs" / "reference" / name).read_text() for name in ("chart.md", "settings.md")
    )
    for path in PATHS:
        group, _, name = path.rpartition(".")
        if group == "apiServer.settings":
            assert f"| `{re.sub('[A-Z]', lambda letter: '_' + letter[0].lower(), name)}` |" in settings
        else:
            of_both = re.sub(r"^(?:operator|apiServer)\.", "*.", path)
            assert f"`{path}`" in chart or f"`{of_both}`" in chart


# A cluster answers what this is for: test_in_a_cluster.py.
ASKS_THE_CLUSTER = {"crds.takeOwnership"}


@pytest.mark.parametrize("path", [path for path in PATHS if path not in ASKS_THE_CLUSTER])
def test_no_value_is_without_effect(path: str) -> None:
    base_values = merged(at("keys.value", FIXED_KEY), NEEDED_WITH.get(path, {}))
    examples = [found for values in EXAMPLES if (found := looked_up(values, path)) is not None]
    example = next(found for found in examples if found != looked_up(DEFAULTS, path))
    assert render(merged(base_values, at(path, example))) != render(base_values)


def test_a_large_number_is_written_with_all_its_digits() -> None:
    """helm has every number as a float, and writes one of a million or more as 1e+06 unless a template prevents it."""
    settings = {"maxBodyBytes": 123456789, "checkpointBytesPerTenant": 5 * 10**12, "trainedTokensPerMinute": 10**7}
    operator = {"hangTimeoutSeconds": 86400000, "deleteGraceSeconds": 86400000, "resyncSeconds": 86400000}
    tolerations = [{"operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 2592000}]
    values = {
        "image": {"tag": "20241115123456"},
        "operator": {**operator, "tolerations": tolerations},
        "apiServer": {"settings": settings},
    }
    written = json.dumps(render(values))
    for number in (*settings.values(), *operator.values(), 2592000):
        assert re.search(rf'[ "]{number}[,"}}\]]', written), number
    assert "e+" not in written


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        pytest.param({"operatr": {}}, "Additional property operatr is not allowed", id="unknown"),
        pytest.param(at("operator.replica", 2), "operator: Additional property replica is not allowed", id="misspelt"),
        pytest.param(
            at("apiServer.ingress.tls.secret", "x"),
            "apiServer.ingress.tls: Additional property secret is not allowed",
            id="nested",
        ),
        pytest.param(
            at("apiServer.settings.loraRank", 3),
            "apiServer.settings: Additional property loraRank is not allowed",
            id="setting",
        ),
        pytest.param(
            {"operator": {"tolerations": [{"keys": "x"}]}},
            "operator.tolerations.0: Additional property keys is not allowed",
            id="in a list",
        ),
    ],
)
def test_a_value_that_does_not_exist_is_refused_by_name(values: Object, sentence: str) -> None:
    assert sentence in refusal(values)


@pytest.mark.parametrize(
    "values",
    [
        pytest.param(at("operator.replicas", "two"), id="text for a number"),
        pytest.param(at("operator.replicas", 1.5), id="half an operator"),
        pytest.param(at("operator.replicas", 0), id="no operator"),
        pytest.param(at("apiServer.replicas", 0), id="no API server"),
        pytest.param(at("image.pullPolicy", "Sometimes"), id="a word of no choice"),
        pytest.param(at("image.tag", 1.0), id="a number for a tag"),
        pytest.param(at("apiServer.image.digest", "sha256:1234"), id="half a digest"),
        pytest.param(at("apiServer.publicUrl", "tinsmith.example.com"), id="a URL without a scheme"),
        pytest.param(at("apiServer.ingress.host", "https://example.com"), id="a URL for a host"),
        pytest.param(at("apiServer.settings.pollHoldSeconds", 90), id="above the bound of the setting"),
        pytest.param(at("checkpoints.storage.size", "a lot"), id="no size"),
        pytest.param(at("checkpoints.storage.accessModes", []), id="no access mode"),
        pytest.param(at("checkpoints.remote.url", "/var/checkpoints"), id="no URL of an object store"),
        pytest.param(at("checkpoints.remote.environment", {"TINSMITH_HOST": "::"}), id="a setting among variables"),
        pytest.param(at("operator.podDisruptionBudget.maxUnavailable", "half"), id="no share"),
        pytest.param(at("operator.podDisruptionBudget.maxUnavailable", 0), id="a node that is never drained"),
        pytest.param(at("apiServer.podDisruptionBudget.maxUnavailable", "0%"), id="no per cent"),
        pytest.param(at("apiServer.podDisruptionBudget.maxUnavailable", "101%"), id="more than all"),
        pytest.param(at("operator.requests.perSecond", 0), id="an operator that asks nothing"),
        pytest.param(at("operator.concurrency", 0), id="no workers of the operator"),
        pytest.param(at("operator.resyncSeconds", 0), id="a resync without end"),
        pytest.param(at("operator.lease.durationSeconds", 2), id="a lease too short to renew"),
        pytest.param(at("operator.restarts.maxConcurrent", 0), id="no turn for anybody"),
        pytest.param(at("operator.restarts.maxConcurrent", "101%"), id="turns for more than all"),
        pytest.param(at("operator.restarts.window", "nights"), id="no window"),
        pytest.param(at("scope.namespaces", ["a", "a"]), id="a namespace twice"),
        pytest.param(at("keys.value", "sk-1234567890123456789012345"), id="a key that the SDK refuses"),
        pytest.param(at("keys.value", "tml-short"), id="a key to guess"),
        pytest.param({"scope": {"namespaces": {"name": "tiny"}}}, id="a mapping for a list"),
        pytest.param({"operator": "yes"}, id="text for an object"),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused(values: Object) -> None:
    assert "values don't meet the specifications of the schema" in refusal(values)


EXISTING_CLAIM = {"storage": {"existingClaim": "ours"}}


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        pytest.param(
            at("image.registry", ""),
            "image.registry is empty, and Tinsmith's images are not published: build them with `make images`, push "
            "them to a registry that the nodes can pull from, and pass --set image.registry=REGISTRY; or load them "
            "into the nodes and pass --set image.registry=tinsmith.local",
            id="no registry",
        ),
        pytest.param(
            at("operator.lease", {"durationSeconds": 12, "renewSeconds": 5}),
            "operator.lease.renewSeconds is 5, and durationSeconds 12: set renewSeconds to at most a third "
            "of it, since a leader stops acting two thirds of the lease after its last renewal",
            id="a lease that is renewed too late",
        ),
        pytest.param(
            at("operator.restarts.window", "Sat 02:00-02:00"),
            'operator.restarts.window is "Sat 02:00-02:00", which closes when it opens',
            id="a window that is never open",
        ),
        pytest.param(
            at("keys", {"value": "tml-a-key-that-is-long-enough", "existingSecret": {"name": "mine"}}),
            "keys.value and keys.existingSecret.name are both set",
            id="a key and a Secret with a key",
        ),
        pytest.param(
            at("apiServer.replicas", 2),
            "apiServer.replicas is 2, but the store is a SQLite file, which only one server can use: put the URL of a "
            "PostgreSQL into a Secret and set apiServer.database.existingSecret.name to it, or keep one replica",
            id="several servers on SQLite",
        ),
        pytest.param(
            merged(DATABASE, {"apiServer": EXISTING_CLAIM}),
            "choose a database, or a SQLite file on that claim",
            id="a database and a claim",
        ),
        pytest.param(
            merged(REMOTE, {"checkpoints": EXISTING_CLAIM}),
            "choose an object store, or that claim",
            id="an object store and a claim",
        ),
        pytest.param(
            at("checkpoints.remote.secretName", "login"), "but no url: set url", id="a login to no object store"
        ),
        pytest.param(
            at("checkpoints.remote.environment", {"AWS_REGION": "x"}), "but no url: set url", id="variables for none"
        ),
        pytest.param(
            merged(REMOTE, at("scope", {"cluster": True, "namespaces": ["a"]})),
            "scope.cluster and scope.namespaces are both set",
            id="a cluster and namespaces",
        ),
        pytest.param(at("scope.namespaces", ["a"]), "cannot mount the checkpoint volume", id="a volume elsewhere"),
        pytest.param(at("scope.cluster", True), "cannot mount the checkpoint volume", id="a volume everywhere"),
        pytest.param(
            merged(ROUTE, at("apiServer.ingress.enabled", True)),
            "apiServer.ingress and apiServer.httpRoute are both enabled",
            id="two entrances",
        ),
        pytest.param(
            at("apiServer.ingress", {"enabled": True, "tls": {"enabled": True}}),
            "set apiServer.ingress.host",
            id="TLS without a host",
        ),
        pytest.param(
            at("apiServer.httpRoute.enabled", True), "name the Gateway of the route", id="a route of no Gateway"
        ),
        pytest.param(
            merged(ROUTE, at("apiServer.httpRoute.timeouts.backendRequestSeconds", 34)),
            "apiServer.httpRoute.timeouts.backendRequestSeconds is 34, but polls are held for up to "
            "apiServer.settings.pollHoldSeconds: set it to at least 35, or to 0 for the Gateway's default",
            id="a timeout that ends polls",
        ),
        pytest.param(
            merged(
                at("apiServer.settings.pollHoldSeconds", 35.5),
                at("apiServer.httpRoute.timeouts.requestSeconds", 45),
            ),
            "set it to at least 46",
            id="a timeout that ends long polls",
        ),
        pytest.param(
            merged(ROUTE, at("apiServer.httpRoute.timeouts.requestSeconds", 60)),
            "apiServer.httpRoute.timeouts.backendRequestSeconds is 3600, and requestSeconds 60: set requestSeconds "
            "to at least as much",
            id="a part that is longer than the whole",
        ),
        pytest.param(
            at("monitoring.prometheusRule.enabled", True),
            "monitoring.prometheusRule is enabled without monitoring.serviceMonitor",
            id="alerts on what is not measured",
        ),
        pytest.param(
            at("apiServer.autoscaling.tlsSecretName", "scaler-tls"),
            "apiServer.autoscaling.tlsSecretName has no effect without apiServer.autoscaling.enabled",
            id="a certificate of no port",
        ),
    ],
)
def test_values_that_exclude_each_other_are_refused_with_the_remedy(values: Object, sentence: str) -> None:
    assert sentence in refusal(values)


@pytest.mark.parametrize("name", sorted(OWN_VARIABLES))
def test_variables_that_the_operator_would_refuse_are_refused_before_it_starts(name: str) -> None:
    values = merged(REMOTE, at("checkpoints.remote.environment", {name: "x"}))
    assert f"checkpoints.remote.environment has {name}, which the operator sets for workers" in refusal(values)


def of_endpoint(name: str, url: str) -> Object:
    return merged(REMOTE, at("checkpoints.remote.environment", {name: url}))


@pytest.mark.parametrize("name", ENDPOINT_VARIABLES)
def test_an_endpoint_that_the_operator_could_not_reach_is_refused_before_it_starts(name: str) -> None:
    for url in ("minio:9000", "ftp://store", "https://", "https://store:port", "https://:9000"):
        with pytest.raises(ValueError, match=r"store|Port"):
            remote_port({name: url})
        assert f'checkpoints.remote.environment.{name} is "{url}"' in refusal(of_endpoint(name, url))


@pytest.mark.parametrize(
    "url", ["http://minio.storage.svc", "https://a.example.com:9000/path", "https://[2001:db8::1]:9"]
)
def test_an_endpoint_that_the_operator_reaches_is_accepted(url: str) -> None:
    assert remote_port({"AWS_ENDPOINT_URL_S3": url})
    assert render(of_endpoint("AWS_ENDPOINT_URL_S3", url))


def test_a_timeout_that_is_left_to_the_gateway_bounds_no_other() -> None:
    timeouts = {"requestSeconds": 0, "backendRequestSeconds": 120}
    assert render(merged(ROUTE, at("apiServer.httpRoute.timeouts", timeouts)))


def test_a_volume_that_every_namespace_has_under_one_name_serves_them_all() -> None:
    assert render(merged(at("scope.namespaces", ["a", "b"]), {"checkpoints": EXISTING_CLAIM}))


@pytest.mark.parametrize("release", ["1st", "a-name-that-is-longer-than-forty-characters"])
def test_a_release_name_that_cannot_name_a_service_is_refused(release: str) -> None:
    assert f'the release name "{release}" is not valid' in refusal({}, release)


def test_values_shared_with_other_charts_are_let_through() -> None:
    assert render({"global": {"anything": 1}})


def test_helm_finds_nothing_to_complain_of() -> None:
    assert "0 chart(s) failed" in lint()


@pytest.mark.parametrize("plural", ["trainingsessions", "samplerpools"])
def test_a_definition_is_the_one_of_crds_and_stays_when_the_release_goes(plural: str) -> None:
    source = yaml.safe_load((ROOT / "crds" / f"tinsmith.dev_{plural}.yaml").read_text())
    rendered = named(render({}), "CustomResourceDefinition", f"{plural}.tinsmith.dev")
    assert rendered["metadata"].pop("annotations") == {"helm.sh/resource-policy": "keep"}
    assert rendered == source


def test_definitions_can_be_left_to_another_release() -> None:
    assert [each for each in render(at("crds.install", False)) if each["kind"] == "CustomResourceDefinition"] == []
