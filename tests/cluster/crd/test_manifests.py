"""Every manifest that users are asked to apply: an API server takes it where pods must be restricted."""

from __future__ import annotations

import json

import pytest
from cluster.crd.conftest import Manifest
from support.kubernetes.api_server import ApiNamespace
from support.kubernetes.documents import Written, blocks_of_pages, manifests_of_examples
from testcluster.errors import ClusterError
from tinsmith_operator.api.names import API_VERSION, SESSION_KIND

IN_PAGES = [each for each in blocks_of_pages() if each.is_manifest]
# This API server has no kinds of KEDA. `tests/cluster/node/test_keda.py` applies their manifest to a KEDA.
IN_EXAMPLES = [each for each in manifests_of_examples() if not each.content["apiVersion"].startswith("keda.sh/")]


def whole(manifest: Manifest) -> Manifest:
    """Return the whole session. An excerpt leaves out what is the same in all of them."""
    head = {"apiVersion": API_VERSION, "metadata": {"name": "excerpt"}} if manifest["kind"] == SESSION_KIND else {}
    return {**head, **manifest}


def pod_of(job: Manifest) -> Manifest:
    template = job["spec"]["template"]
    metadata = {**template["metadata"], "name": job["metadata"]["name"]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}


@pytest.mark.parametrize("written", [*IN_PAGES, *IN_EXAMPLES], ids=lambda each: f"{each.where} {each.content['kind']}")
def test_a_documented_manifest_is_accepted(api: ApiNamespace, written: Written) -> None:
    manifest = whole(written.content)
    api.would_create(manifest)
    # The pod of a Job is admitted or refused only when the Job controller creates it, so check it here.
    if manifest["kind"] == "Job":
        api.would_create(pod_of(manifest))


def test_pages_and_examples_have_manifests_to_find() -> None:
    assert {each.where.partition(":")[0] for each in IN_PAGES} >= {"docs/reference/training-session.md"}
    assert {each.content["kind"] for each in IN_EXAMPLES} >= {SESSION_KIND, "Job", "PersistentVolumeClaim"}


def test_a_misspelt_field_would_be_seen(api: ApiNamespace) -> None:
    sessions = [json.dumps(each.content) for each in IN_EXAMPLES if each.content["kind"] == SESSION_KIND]
    misspelt = json.loads(next(each for each in sessions if '"slots"' in each).replace('"slots"', '"slot"'))
    with pytest.raises(ClusterError, match=r'unknown field "spec\.adapters\.slot"'):
        api.would_create(misspelt)
