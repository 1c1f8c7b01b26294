"""The pods of the chart, which meet the restricted Pod Security Standard and get settings that their programs know."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.kubernetes.charts import CHART, ROOT, Object, at, environment, looked_up, merged, named, pods, render
from tinsmith_operator.settings import Settings as OperatorSettings
from tinsmith_operator.settings import unknown_variables as unknown_to_the_operator
from tinsmith_server.configuration import load_settings
from tinsmith_server.configuration import unknown_variables as unknown_to_the_server
from tinsmith_server.settings import Settings as ServerSettings

VALUES = {
    file.stem: yaml.safe_load(file.read_text())
    for file in [*sorted((Path(__file__).parent / "values").glob("*.yaml")), *ROOT.glob("examples/values-*.yaml")]
}
EVERYTHING = VALUES["everything"]
PODS = pods(render({}))
ALL_PODS = {f"{name}, {case}": pod for case, values in VALUES.items() for name, pod in pods(render(values)).items()}

every_pod = pytest.mark.parametrize("pod", ALL_PODS.values(), ids=ALL_PODS.keys())


@every_pod
def test_a_pod_is_restricted_and_cannot_write_to_its_root(pod: Object) -> None:
    security = pod["securityContext"]
    assert security["runAsNonRoot"] is True
    assert (security["runAsUser"], security["runAsGroup"], security["fsGroup"]) == (65532, 65532, 65532)
    assert security["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in pod["containers"]:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }


@every_pod
def test_scratch_space_is_bounded(pod: Object) -> None:
    scratch = [volume["emptyDir"] for volume in pod.get("volumes", []) if "emptyDir" in volume]
    assert all(each.get("sizeLimit") for each in scratch)


@every_pod
def test_a_pod_requests_its_resources_and_has_a_memory_limit(pod: Object) -> None:
    for container in pod["containers"]:
        assert container["resources"]["requests"].keys() >= {"cpu", "memory"}
        assert "memory" in container["resources"]["limits"]


def test_only_programs_that_call_kubernetes_have_a_token() -> None:
    assert {name: pod["automountServiceAccountToken"] for name, pod in PODS.items()} == {
        "Deployment tinsmith-operator": True,
        "Deployment tinsmith-api-server": True,
        "Pod tinsmith-test-step": False,
    }


DATABASE = at("apiServer.database.existingSecret.name", "postgresql")
REMOTE = at("checkpoints.remote.url", "s3://bucket")
API_SERVER = "tinsmith-api-server"


def test_a_store_in_a_file_never_has_two_servers() -> None:
    spec = named(render({}), "Deployment", API_SERVER)["spec"]
    assert (spec["replicas"], spec["strategy"]) == (1, {"type": "Recreate"})


def test_servers_on_a_database_are_replaced_one_by_one_and_none_goes_before_another_is_ready() -> None:
    values = merged(DATABASE, at("apiServer.replicas", 3))
    spec = named(render(values), "Deployment", API_SERVER)["spec"]
    rolling = {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}
    assert (spec["replicas"], spec["strategy"]) == (3, rolling)


@pytest.mark.parametrize(
    ("values", "claims"),
    [
        pytest.param({}, {"tinsmith-api-server-data", "tinsmith-checkpoints"}, id="neither"),
        pytest.param(DATABASE, {"tinsmith-checkpoints"}, id="database"),
        pytest.param(REMOTE, {"tinsmith-api-server-data"}, id="object store"),
        pytest.param(merged(DATABASE, REMOTE), set(), id="both"),
    ],
)
def test_a_volume_is_created_only_if_no_other_storage_is_configured(values: Object, claims: set[str]) -> None:
    objects = render(values)
    volumes = pods(objects)[f"Deployment {API_SERVER}"]["volumes"]
    mounted = {each["persistentVolumeClaim"]["claimName"] for each in volumes if "persistentVolumeClaim" in each}
    assert mounted == claims
    assert {each["metadata"]["name"] for each in objects if each["kind"] == "PersistentVolumeClaim"} == claims


@every_pod
def test_a_container_mounts_every_volume_of_its_pod_and_no_other(pod: Object) -> None:
    [container] = pod["containers"]
    assert {each["name"] for each in container.get("volumeMounts", [])} == {
        each["name"] for each in pod.get("volumes", [])
    }


def test_a_budget_lets_a_single_replica_be_drained() -> None:
    def budgets(values: Object) -> set[str]:
        return {each["metadata"]["name"] for each in render(values) if each["kind"] == "PodDisruptionBudget"}

    assert budgets({}) == set()
    assert budgets(at("operator.replicas", 2)) == {"tinsmith-operator"}
    assert budgets(merged(DATABASE, at("apiServer.replicas", 2))) == {API_SERVER}


def test_labels_of_the_chart_win_over_labels_of_values() -> None:
    """Otherwise the Deployment would not find its pods, and the workers' policies not their clients."""
    labels = named(render(EVERYTHING), "Deployment", "tinsmith-operator")["spec"]["template"]["metadata"]["labels"]
    assert labels["team"] == "platform"
    assert labels["app.kubernetes.io/component"] == "operator"


def test_every_image_comes_from_the_registry_that_is_given_and_is_pinned_by_its_digest() -> None:
    found = pods(render(VALUES["air-gapped"]))
    variables = environment(found["Deployment tinsmith-operator"])
    images = [container["image"] for pod in found.values() for container in pod["containers"]]
    for image in [*images, variables["TINSMITH_OPERATOR_TRAINER_IMAGE"]]:
        assert re.fullmatch(r"registry\.internal:5000/mirror/tinsmith-[a-z-]+@sha256:[0-9a-f]{64}", image)
    assert {len(pod["imagePullSecrets"]) for pod in found.values()} == {1}


# ---- arguments and environment of the programs


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_the_operator_knows_every_variable_of_the_chart(values: Object, monkeypatch: pytest.MonkeyPatch) -> None:
    variables = environment(pods(render(values))["Deployment tinsmith-operator"])
    set_environment(variables, monkeypatch)
    assert unknown_to_the_operator() == []
    assert len(OperatorSettings().model_fields_set) == len(variables)


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_the_api_server_knows_every_variable_of_the_chart(values: Object, monkeypatch: pytest.MonkeyPatch) -> None:
    variables = environment(pods(render(values))["Deployment tinsmith-api-server"])
    set_environment(variables, monkeypatch)
    assert unknown_to_the_server() is None
    others = {"HOME", "OTEL_EXPORTER_OTLP_ENDPOINT", *(looked_up(values, "checkpoints.remote.environment") or {})}
    assert len(load_settings({}).model_fields_set) == len(variables.keys() - others)


def set_environment(variables: Object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the variables. A value from a Secret or from the pod itself can be any."""
    for name in [name for name in os.environ if name.startswith("TINSMITH_")]:
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value or "tml-given-elsewhere")


def schema_of_settings(name: str) -> Object:
    found: Object = ServerSettings.model_json_schema()["properties"][name]
    return found


BOUNDS = ("type", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
SETTINGS = yaml.safe_load((CHART / "values.schema.yaml").read_text())["properties"]["apiServer"]["properties"][
    "settings"
]


@pytest.mark.parametrize(("name", "written"), SETTINGS["properties"].items(), ids=SETTINGS["properties"])
def test_a_setting_of_the_server_has_the_server_s_own_bounds(name: str, written: Object) -> None:
    field = schema_of_settings(re.sub(r"([A-Z])", r"_\1", name).lower())
    assert {key: written.get(key) for key in BOUNDS} == {key: field.get(key) for key in BOUNDS}


def default_of(path: str) -> Any:
    found = yaml.safe_load((CHART / "values.yaml").read_text())
    for name in path.split("."):
        found = found[name]
    return found


def test_defaults_are_those_of_the_programs() -> None:
    assert default_of("operator.hangTimeoutSeconds") == OperatorSettings.model_fields["hang_timeout_seconds"].default
    assert default_of("operator.logLevel") == OperatorSettings.model_fields["log_level"].default
    assert default_of("apiServer.logLevel") == ServerSettings.model_fields["log_level"].default


def priority_classes(values: Object, **release: str) -> list[Object]:
    return [each for each in render(values, **release) if each["kind"] == "PriorityClass"]


def priorities(values: Object) -> dict[str, str | None]:
    return {name: pod.get("priorityClassName") for name, pod in pods(render(values)).items() if "Deployment" in name}


def test_operator_and_api_server_have_a_priority_above_that_of_workers() -> None:
    [made] = priority_classes({})
    assert made["value"] > 0
    assert set(priorities({}).values()) == {made["metadata"]["name"]}
    assert "priorityClassName" not in yaml.safe_dump([each for each in render({}) if each["kind"] == "TrainingSession"])


def test_priority_classes_of_two_releases_have_two_names_and_so_has_another_value() -> None:
    """They belong to no namespace, their value cannot be changed, and Kubernetes keeps the names of `system-…`."""
    made = [
        priority_classes({}, namespace=namespace, release=release)[0]["metadata"]["name"]
        for namespace, release in (("a", "tinsmith"), ("b", "tinsmith"), ("a", "other"), ("system-x", "tinsmith"))
    ]
    made += [priority_classes(at("priorityClass.value", 5), namespace="a")[0]["metadata"]["name"]]
    assert len(set(made)) == len(made)
    assert not [name for name in made if name.startswith("system-")]


def test_a_priority_class_of_the_user_is_taken_instead_and_none_is_made_where_none_may_be() -> None:
    none = at("priorityClass.create", False)
    assert priority_classes(none) == []
    assert set(priorities(none).values()) == {None}
    named_operator = merged(none, at("operator.priorityClassName", "infra"))
    own = merged(named_operator, at("apiServer.priorityClassName", "serving"))
    assert sorted(filter(None, priorities(own).values())) == ["infra", "serving"]
    mixed = priorities(at("operator.priorityClassName", "infra"))
    [made] = priority_classes({})
    assert sorted(filter(None, mixed.values())) == sorted(["infra", made["metadata"]["name"]])
