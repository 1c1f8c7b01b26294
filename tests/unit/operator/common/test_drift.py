"""The managers of an object's fields."""

from __future__ import annotations

from typing import Any

import pytest
from tinsmith_operator.common.drift import has_foreign_content, own_managed_fields

OPERATOR = "tinsmith-operator"


def entry(manager: str, operation: str, fields: dict[str, Any], **more: str) -> dict[str, Any]:
    return {"manager": manager, "operation": operation, "apiVersion": "v1", "fieldsV1": fields, **more}


def manifest(*managed: dict[str, Any], kind: str = "Service") -> dict[str, Any]:
    return {"kind": kind, "metadata": {"managedFields": list(managed)}}


PORTS = {"f:spec": {"f:ports": {}}}
SELECTOR = {"f:spec": {"f:selector": {"f:of": {}}}}
LABELS = {"f:metadata": {"f:labels": {"f:of": {}}}}
THEIR_STATUS = entry("controller", "Update", {"f:status": {}}, subresource="status")


def test_own_updated_fields_become_applied_fields() -> None:
    assert own_managed_fields(manifest(entry(OPERATOR, "Update", PORTS), THEIR_STATUS)) == [
        entry(OPERATOR, "Apply", PORTS),
        THEIR_STATUS,
    ]


def test_a_book_that_is_right_stays_as_it_is() -> None:
    right = [entry(OPERATOR, "Apply", PORTS), entry("kubectl-label", "Update", LABELS), THEIR_STATUS]
    assert own_managed_fields(manifest(*right)) == right
    assert not has_foreign_content(manifest(*right))


def test_foreign_content_becomes_the_operators_and_foreign_labels_stay_foreign() -> None:
    live = manifest(entry(OPERATOR, "Apply", PORTS), entry("kubectl-edit", "Update", {**SELECTOR, **LABELS}))
    assert has_foreign_content(live)
    both = {"f:spec": {**PORTS["f:spec"], **SELECTOR["f:spec"]}}
    assert own_managed_fields(live) == [entry(OPERATOR, "Apply", both), entry("kubectl-edit", "Update", LABELS)]


def test_an_entry_that_held_nothing_else_goes() -> None:
    live = manifest(entry("kubectl-edit", "Update", SELECTOR), entry(OPERATOR, "Update", PORTS))
    [only] = own_managed_fields(live)
    assert (only["manager"], only["operation"]) == (OPERATOR, "Apply")
    assert only["fieldsV1"] == {"f:spec": {**PORTS["f:spec"], **SELECTOR["f:spec"]}}


@pytest.mark.parametrize("manager", [OPERATOR, "kubectl-edit"])
def test_the_result_needs_no_second_correction(manager: str) -> None:
    live = manifest(entry(manager, "Update", SELECTOR), entry(OPERATOR, "Apply", PORTS))
    again = manifest(*own_managed_fields(live))
    assert own_managed_fields(again) == again["metadata"]["managedFields"]
    assert not has_foreign_content(again)


def test_fields_that_controllers_write_into_a_claim_stay_foreign() -> None:
    volume = entry("kube-controller-manager", "Update", {"f:spec": {"f:volumeName": {}}})
    live = manifest(entry(OPERATOR, "Update", PORTS), volume, kind="PersistentVolumeClaim")
    assert not has_foreign_content(live)
    assert own_managed_fields(live) == [entry(OPERATOR, "Apply", PORTS), volume]


def test_a_foreign_subresource_is_no_content() -> None:
    scaled = entry("kubectl", "Update", {"f:spec": {"f:replicas": {}}}, subresource="scale")
    assert not has_foreign_content(manifest(entry(OPERATOR, "Apply", PORTS), scaled))


SUSPEND = {"f:spec": {"f:suspend": {}}}


def test_fields_that_say_when_it_runs_keep_their_manager() -> None:
    queue = entry("kueue", "Update", {"f:spec": {"f:suspend": {}, "f:headGroupSpec": {}}})
    live = manifest(entry(OPERATOR, "Update", SELECTOR), queue, kind="RayCluster")
    assert not has_foreign_content(live)
    assert own_managed_fields(live) == [entry(OPERATOR, "Apply", SELECTOR), queue]


def test_a_field_that_a_queue_webhook_added_to_our_request_is_released_and_not_removed() -> None:
    both = {"f:spec": {**SELECTOR["f:spec"], **SUSPEND["f:spec"]}}
    live = manifest(entry(OPERATOR, "Update", both), kind="RayCluster")
    assert own_managed_fields(live) == [entry(OPERATOR, "Apply", both)]
    live["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "gpus"}
    assert own_managed_fields(live) == [entry(OPERATOR, "Apply", SELECTOR)]
