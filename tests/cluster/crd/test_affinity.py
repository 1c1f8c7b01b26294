"""An affinity of a session's or a pool's pod is Kubernetes' own, field by field, and nothing else fits in its place."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster.crd.conftest import Manifest
from cluster.crd.test_pool_validation import pool
from cluster.crd.test_validation import session
from support.kubernetes.api_server import ApiNamespace, ApiServer
from support.kubernetes.crds import CRD_FILE, POOL_CRD_FILE, Schema, root_schema, walk
from testcluster.errors import ClusterError

# The API server's own limit is 10,000; the parser of Python goes some 1,000 deep.
DEPTH = 3000
SAID = ("type", "format", "required", "x-kubernetes-list-type", "x-kubernetes-map-type")
OWNERS = pytest.mark.parametrize("owner", [session, pool])

SELECTOR = {
    "matchLabels": {"app": "trainer"},
    "matchExpressions": [{"key": "example.com/team", "operator": "NotIn", "values": ["a", "b"]}],
}
TERM = {
    "labelSelector": SELECTOR,
    "matchLabelKeys": ["pod-template-hash"],
    "mismatchLabelKeys": ["tenant"],
    "namespaces": ["team"],
    "namespaceSelector": {},
    "topologyKey": "topology.kubernetes.io/zone",
}
NODES = {
    "matchExpressions": [
        {"key": "gpus", "operator": "Gt", "values": ["3"]},
        {"key": "old", "operator": "DoesNotExist"},
    ],
    "matchFields": [{"key": "metadata.name", "operator": "In", "values": ["node-1"]}],
}
REQUIRED, PREFERRED = (
    "requiredDuringSchedulingIgnoredDuringExecution",
    "preferredDuringSchedulingIgnoredDuringExecution",
)
OTHERS = {REQUIRED: [TERM], PREFERRED: [{"weight": 100, "podAffinityTerm": TERM}]}
ORDINARY: Manifest = {
    "nodeAffinity": {
        REQUIRED: {"nodeSelectorTerms": [NODES]},
        PREFERRED: [{"weight": 1, "preference": NODES}],
    },
    "podAffinity": OTHERS,
    "podAntiAffinity": OTHERS,
}


@OWNERS
def test_every_field_of_an_affinity_is_kept_as_it_was_written(owner: Any, api: ApiNamespace) -> None:
    kept = api.would_create(owner(pod={"affinity": ORDINARY}))
    assert kept["spec"]["pod"]["affinity"] == ORDINARY


@OWNERS
@pytest.mark.parametrize("place", ORDINARY)
def test_an_affinity_that_is_none_is_refused_with_a_sentence(owner: Any, place: str, api: ApiNamespace) -> None:
    with pytest.raises(ClusterError, match=f'unknown field "spec.pod.affinity.{place}.required"'):
        api.would_create(owner(pod={"affinity": {place: {"required": []}}}))
    with pytest.raises(ClusterError, match=rf"spec.pod.affinity.{place}.{REQUIRED}: Invalid value.*must be of type"):
        api.would_create(owner(pod={"affinity": {place: {REQUIRED: "gpu"}}}))


@OWNERS
@pytest.mark.parametrize("place", [None, *ORDINARY])
def test_no_object_is_kept_deeper_than_its_readers_go(owner: Any, place: str | None, api: ApiNamespace) -> None:
    """The client does not ask for unknown fields to be refused, so the API server drops them."""
    affinity = {place: "deep"} if place else "deep"
    manifest = owner(pod={"affinity": affinity})
    body = json.dumps(manifest).replace('"deep"', '{"a":' * DEPTH + "{}" + "}" * DEPTH)
    api.api.call("POST", api.api.path(manifest, api.name), body.encode())
    try:
        kept = api.get(manifest)
    finally:
        api.delete(manifest)
    assert not kept["spec"]["pod"]["affinity"].get(place)
    assert '"f:a"' not in json.dumps(kept["metadata"])


@pytest.fixture(scope="module")
def native(api_server: ApiServer) -> Schema:
    """Kubernetes' schemas of its own types."""
    schemas: Schema = api_server.call("GET", "/openapi/v3/api/v1")["components"]["schemas"]
    return schemas


def resolved(schema: Schema, native: Schema) -> Schema:
    """Return the schema without references, as a CRD needs it."""
    [reference] = [each["$ref"] for each in schema.get("allOf", [])] or [schema.get("$ref")]
    if reference is not None:
        schema = native[reference.rpartition("/")[2]]
    parts: Schema = {
        name: resolved(schema[name], native) for name in ("items", "additionalProperties") if name in schema
    }
    fields = {name: resolved(field, native) for name, field in schema.get("properties", {}).items()}
    return {**schema, **parts, **({"properties": fields} if fields else {})}


def shape(schema: Schema) -> Iterator[tuple[str, dict[str, Any]]]:
    for place, field in walk(schema):
        said = {name: field[name] for name in SAID if name in field}
        if said.get("required"):
            said["required"] = sorted(said["required"])
        yield place, said


@pytest.mark.parametrize("file", [CRD_FILE, POOL_CRD_FILE], ids=["session", "pool"])
def test_an_affinity_has_the_fields_that_kubernetes_gives_it(file: Path, native: Schema) -> None:
    pod = root_schema(file)["properties"]["spec"]["properties"]["pod"]
    own = pod["properties"]["affinity"]
    assert dict(shape(own)) == dict(shape(resolved(native["io.k8s.api.core.v1.Affinity"], native)))
