"""Whether a live object already holds what is wanted."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from support.built_sessions import BUILT, Built
from tinsmith_operator.decide.difference import holds
from tinsmith_operator.decide.keeper import template_of
from tinsmith_operator.model.base import Manifest


def with_defaults(manifest: Manifest) -> Manifest:
    """What an API server adds."""
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
def test_an_object_with_the_api_servers_defaults_holds_what_was_wanted(built: Built) -> None:
    for manifest in built.objects():
        assert holds(with_defaults(manifest), manifest)


@pytest.mark.parametrize(
    ("live", "wanted", "held"),
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
def test_what_is_held(live: Any, wanted: Any, held: bool) -> None:
    assert holds(live, wanted) is held


@pytest.mark.parametrize("built", BUILT.values(), ids=BUILT)
def test_a_field_that_is_wanted_no_more_is_noticed(built: Built) -> None:
    """By the hash of what was wanted: the field itself looks like somebody's addition."""
    more = built.objects()[-1]
    template_of(more)["spec"]["nodeSelector"] = {"zone": "b"}
    fewer = built.objects()[-1]
    more["metadata"]["annotations"] = {"tinsmith.dev/configuration": "the hash of more"}
    assert not holds(more, fewer)
