"""The comparison of a live object with the desired one, however the API server stored it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from support.operator.built_sessions import BUILT, Built
from support.operator.model_cluster import ModelCluster
from support.operator.pool_world import PoolWorld
from support.operator.resources import pool_manifest, session_manifest
from support.operator.session_world import World
from tinsmith_operator.api.base import Manifest
from tinsmith_operator.api.names import CONFIGURATION_ANNOTATION
from tinsmith_operator.common.actions import Apply, Create, IssueCertificate
from tinsmith_operator.common.drift import holds
from tinsmith_operator.common.workloads import template_of


def with_defaults(manifest: Manifest) -> Manifest:
    """Return the object with the fields that an API server adds."""
    live = copy.deepcopy(manifest)
    live["metadata"] |= {"uid": "u", "resourceVersion": "7", "managedFields": [{"manager": "tinsmith-operator"}]}
    live["status"] = {"replicas": 1}
    if live["kind"] == "StatefulSet":
        spec = live["spec"]["template"]["spec"]
        spec |= {"restartPolicy": "Always", "dnsPolicy": "ClusterFirst"}
        spec["containers"][0] |= {"terminationMessagePath": "/dev/termination-log", "resources": {}} | (
            {"resources": spec["containers"][0]["resources"]} if "resources" in spec["containers"][0] else {}
        )
        spec["volumes"].append({"name": "injected", "emptyDir": {}})
    if live["kind"] == "NetworkPolicy" and not live["spec"]["egress"]:
        del live["spec"]["egress"]
    return live


@pytest.mark.parametrize("built", BUILT.values(), ids=BUILT)
def test_an_object_with_the_defaults_of_the_api_server_holds_the_desired_fields(built: Built) -> None:
    for manifest in built.objects():
        assert holds(with_defaults(manifest), manifest)


@pytest.mark.parametrize(
    ("live", "desired", "held"),
    [
        ({"a": 1, "b": 2}, {"a": 1}, True),
        ({"b": 2}, {"a": 1}, False),
        (None, {}, True),
        (None, {"a": 1}, False),
        ({"args": ["x", "y"]}, {"args": ["x"]}, False),
        ({"args": ["y", "x"]}, {"args": ["x", "y"]}, False),
        ({"env": [{"name": "b"}, {"name": "a", "value": "1"}]}, {"env": [{"name": "a", "value": "1"}]}, True),
        ({"env": [{"name": "a", "value": "2"}]}, {"env": [{"name": "a", "value": "1"}]}, False),
        ({"env": []}, {"env": [{"name": "a"}]}, False),
        ({"tolerations": [{"key": "a"}, {"key": "b"}]}, {"tolerations": [{"key": "a"}]}, False),
        ({"requests": {"cpu": "500m", "memory": "1Gi"}}, {"requests": {"cpu": "0.5", "memory": "1024Mi"}}, True),
        ({"requests": {"cpu": "500m"}}, {"requests": {"cpu": "0.6"}}, False),
        ({"limits": {"cpu": "1"}}, {"limits": {"cpu": 1}}, True),
        ({"limits": {"cpu": "334m"}}, {"limits": {"cpu": "0.3333"}}, True),
        ({"limits": {"cpu": "333m"}}, {"limits": {"cpu": "0.3333"}}, False),
        ({"limits": {"cpu": "1m"}}, {"limits": {"cpu": "100n"}}, True),
        ({"requests": {"memory": "1073741931375m"}}, {"requests": {"memory": "1.0000001Gi"}}, True),
        ({"requests": {"memory": "9223372036854775807"}}, {"requests": {"memory": "1e30"}}, True),
        ({"sizeLimit": "1073741931374182401n"}, {"sizeLimit": "1.0000001Gi"}, False),
        ({"sizeLimit": "1"}, {"sizeLimit": "0.9999999999"}, True),
        ({"resourceFieldRef": {"divisor": "1"}}, {"resourceFieldRef": {"divisor": "1000m"}}, True),
        ({"limits": {}}, {"limits": {"cpu": 1}}, False),
        ({"args": ["1"]}, {"args": ["1.0"]}, False),
        ({"env": [{"name": "a"}]}, {"env": [{"name": "a", "value": ""}]}, True),
        ({"env": [{"name": "a", "value": "1"}]}, {"env": [{"name": "a", "value": ""}]}, False),
        ({"readOnly": None}, {"readOnly": False}, False),
        ("text", {"a": 1}, False),
        ("text", ["a"], False),
    ],
    ids=repr,
)
def test_a_live_object_holds_the_desired_fields(live: Any, desired: Any, held: bool) -> None:
    assert holds(live, desired) is held


@pytest.mark.parametrize("built", BUILT.values(), ids=BUILT)
def test_a_field_that_is_wanted_no_more_is_noticed(built: Built) -> None:
    """The hash of the desired object shows it; the field itself looks like another manager's addition."""
    more = built.objects()[-1]
    template_of(more)["spec"]["nodeSelector"] = {"zone": "b"}
    fewer = built.objects()[-1]
    more["metadata"]["annotations"] = {"tinsmith.dev/configuration": "the hash of more"}
    assert not holds(more, fewer)


def rounds_a_quantity(manifest: Manifest) -> None:
    """Round a quantity as Kubernetes does, although its documentation does not say so."""
    if manifest["kind"] in TEMPLATED:
        template_of(manifest)["spec"]["containers"][0]["resources"] = {"limits": {"memory": "7Gi"}}


def puts_a_mirror_in_place_of_the_registry(manifest: Manifest) -> None:
    if manifest["kind"] in TEMPLATED:
        template_of(manifest)["spec"]["containers"][0]["image"] = "mirror.example.com/trainer"


def sorts_lists(manifest: Manifest) -> None:
    if manifest["kind"] in TEMPLATED:
        template_of(manifest)["spec"]["containers"][0]["args"].sort()
    if manifest["kind"] == "NetworkPolicy":
        manifest["spec"]["policyTypes"].sort()


def drops_a_field(manifest: Manifest) -> None:
    for field in ("publishNotReadyAddresses", "revisionHistoryLimit", "egress", "unhealthyPodEvictionPolicy"):
        manifest.get("spec", {}).pop(field, None)


def changes_labels_and_annotations(manifest: Manifest) -> None:
    manifest["metadata"]["labels"]["app.kubernetes.io/component"] = "governed"
    if (annotations := manifest["metadata"].get("annotations", {})).get(CONFIGURATION_ANNOTATION):
        annotations[CONFIGURATION_ANNOTATION] += " (seen)"


def lowers_the_claim(manifest: Manifest) -> None:
    if manifest["kind"] == "PersistentVolumeClaim":
        manifest["spec"]["resources"]["requests"]["storage"] = "5Gi"


TEMPLATED = ("StatefulSet", "Deployment")
REWRITES: tuple[Callable[[Manifest], None], ...] = (
    rounds_a_quantity,
    puts_a_mirror_in_place_of_the_registry,
    sorts_lists,
    drops_a_field,
    changes_labels_and_annotations,
    lowers_the_claim,
)


@pytest.mark.parametrize("rewrite", REWRITES)
@pytest.mark.parametrize(
    "world", [lambda: World(session_manifest()), lambda: PoolWorld(pool_manifest())], ids=["session", "pool"]
)
def test_a_request_that_the_api_server_rewrites_is_not_repeated(
    world: Callable[[], ModelCluster], rewrite: Callable[[Manifest], None]
) -> None:
    cluster = world()
    cluster.rewrite = rewrite
    cluster.settle()


@pytest.mark.parametrize("rewrite", REWRITES)
def test_an_operator_that_has_just_started_asks_once_and_no_more(rewrite: Callable[[Manifest], None]) -> None:
    cluster = World(session_manifest())
    cluster.rewrite = rewrite
    cluster.settle()
    cluster.stored = {}
    asked = [action for action in cluster.operate() if isinstance(action, Create | Apply | IssueCertificate)]
    cluster.settle()
    assert len({action.manifest["kind"] for action in asked}) == len(asked)


def test_later_changes_of_a_rewritten_object_are_still_reverted() -> None:
    cluster = World(session_manifest())
    cluster.rewrite = rounds_a_quantity
    cluster.settle()
    workload = cluster.objects["StatefulSet", cluster.name]
    workload["spec"]["template"]["spec"]["containers"][0]["args"] = ["--edited"]
    cluster.settle()
    [container] = cluster.objects["StatefulSet", cluster.name]["spec"]["template"]["spec"]["containers"]
    assert "--edited" not in container["args"]
