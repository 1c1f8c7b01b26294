"""The API server's validation of SessionTemplates, and of the sessions that name one."""

from __future__ import annotations

import re
from typing import Any

import pytest
from cluster.crd.conftest import Manifest, stored_with_status
from support.kubernetes.api_server import ApiNamespace, ApiServer
from support.kubernetes.fixtures import Cluster
from support.operator.built_sessions import EVERYTHING
from support.operator.resources import ON_CLAIM
from testcluster.errors import ClusterError
from tinsmith_operator.api.names import API_VERSION, SESSION_KIND, TEMPLATE_KIND

DELETES: Manifest = {"retentionPolicy": {"whenDeleted": "Delete"}}
NAMED: Manifest = {"templateRef": {"name": "qwen"}}


def template(name: str = "qwen", **spec: Any) -> Manifest:
    model = {"name": "Qwen/Qwen3-8B", "source": ON_CLAIM}
    spec = {"model": model, **spec}
    return {"apiVersion": API_VERSION, "kind": TEMPLATE_KIND, "metadata": {"name": name}, "spec": spec}


def session(**spec: Any) -> Manifest:
    return {"apiVersion": API_VERSION, "kind": SESSION_KIND, "metadata": {"name": "mine"}, "spec": spec}


@pytest.mark.parametrize(
    "manifest",
    [
        template(),
        template(**{**EVERYTHING, "maxSessions": 1}),
        template(warm=2, maxSessions=2, storage=DELETES),
        session(**NAMED),
        session(**NAMED, suspend=True),
    ],
    ids=["the least", "everything", "warm", "a session", "a suspended session"],
)
def test_what_is_valid_is_taken(api: ApiNamespace, manifest: Manifest) -> None:
    api.would_create(manifest)


@pytest.mark.parametrize(
    ("manifest", "message"),
    [
        (template("x" * 47), "at most 46 characters"),
        (template(warm=2, storage=DELETES), "spec.warm must be at most spec.maxSessions"),
        (template(warm=1), "set spec.storage.retentionPolicy.whenDeleted to Delete"),
        (template(maxSessions=2, storage={"existingClaim": "mine"}), "holds the journal of one session"),
        (template(suspend=True), 'unknown field "spec.suspend"'),
        (template(engine="nemo-rl"), "engine nemo-rl needs spec.pod.image"),
        (session(), "give exactly one of spec.model and spec.templateRef"),
        (session(**NAMED, adapters={"slots": 2}), "the SessionTemplate sets all fields but spec.suspend"),
        (session(**NAMED, pod={"image": "mine"}), "the SessionTemplate sets all fields but spec.suspend"),
    ],
)
def test_what_is_invalid_is_refused_with_the_cure(api: ApiNamespace, manifest: Manifest, message: str) -> None:
    with pytest.raises(ClusterError, match=re.escape(message)):
        api.would_create(manifest)


@pytest.mark.usefixtures("definition")
def test_neither_the_name_nor_the_copy_of_the_template_can_be_changed(
    api_cluster: Cluster, api_server: ApiServer
) -> None:
    status = {"template": {"name": "qwen", "generation": 1, "spec": "{}"}}
    with stored_with_status(api_cluster, api_server, session(**NAMED), status) as kubectl:
        for patch, subresource, message in (
            ('{"spec": {"templateRef": {"name": "another"}}}', [], "spec.templateRef cannot be changed"),
            ('{"status": {"template": {"spec": "{1}"}}}', ["--subresource=status"], "status.template is the copy"),
            ('{"status": {"template": null}}', ["--subresource=status"], "status.template is the copy"),
        ):
            with pytest.raises(ClusterError, match=message):
                kubectl("patch", "trainingsession", "mine", "--type=merge", f"--patch={patch}", *subresource)
        kubectl("patch", "trainingsession", "mine", "--type=merge", '--patch={"spec": {"suspend": true}}')
