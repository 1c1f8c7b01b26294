"""The fields of a workload that a queue such as Kueue controls. The queue decides when and where the workload runs.

A workload belongs to a queue if the workload has the queue's label, or if another manager has written `spec.suspend`.
In a workload of a queue, the operator does not write `spec.suspend`, and keeps the fields that the queue adds to
templates. If the operator also wrote `spec.suspend`, the operator and the queue would repeatedly overwrite the field.
To stop a workload of a queue, the operator deletes the workload, and creates the workload again later.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from tinsmith_operator.api.base import Manifest
from tinsmith_operator.api.names import MANAGER, QUEUE_LABEL

SUSPEND = "f:suspend"

PLACEMENT = ("nodeSelector", "tolerations", "schedulingGates")
"""The fields in a template's spec that select the nodes on which the queue has found room."""
MARKS = ("labels", "annotations")
"""The fields in a template's metadata by which the queue recognises the pods of the workload."""


def is_held(manifest: Manifest) -> bool:
    """Return whether another manager decides when the workload runs."""
    return QUEUE_LABEL in _labels(manifest) or next(_holders(manifest), None) is not None


def holder_name(manifest: Manifest) -> str:
    """Return the name of the queue or of another manager that decides when the workload runs."""
    if (queue := _labels(manifest).get(QUEUE_LABEL)) is not None:
        return f"queue {queue}"
    manager = next(_holders(manifest), None)
    return f"field manager {manager}" if manager is not None else "another manager"


def controls_suspend(entry: Manifest) -> bool:
    """Return whether another manager has written `spec.suspend`, according to these managed fields."""
    return entry.get("manager") != MANAGER and not entry.get("subresource") and SUSPEND in _spec_fields(entry)


def without_suspend(entry: Manifest) -> Manifest:
    """Return the operator's managed fields without `spec.suspend`.

    The admission webhook of a queue writes `spec.suspend` into the operator's own request. So the API server records
    `spec.suspend` as the operator's field. If `spec.suspend` is recorded as the operator's field, an apply without the
    field would remove it, and pods would start.
    """
    if SUSPEND not in _spec_fields(entry):
        return entry
    left = {name: tree for name, tree in _spec_fields(entry).items() if name != SUSPEND}
    return {**entry, "fieldsV1": {**entry["fieldsV1"], "f:spec": left}}


def keep_queue_fields(live: Manifest, desired: Manifest) -> Manifest:
    """Return the desired RayCluster, with the fields that the queue has written."""
    merged = copy.deepcopy(desired)
    merged["spec"].pop("suspend", None)
    for live_fields, merged_fields in zip(_templates(live), _templates(merged), strict=False):
        _keep(live_fields.get("metadata") or {}, merged_fields["metadata"], MARKS)
        _keep(live_fields.get("spec") or {}, merged_fields["spec"], PLACEMENT)
    return merged


def _keep(live_fields: Manifest, held_fields: Manifest, fields: tuple[str, ...]) -> None:
    """Copy fields of the live object.

    In a map, a desired value takes precedence. A list is copied as a whole, because the live list contains the desired
    items.
    """
    for name in fields:
        live = live_fields.get(name)
        if isinstance(live, dict):
            held_fields[name] = {**live, **held_fields.get(name, {})}
        elif live:
            held_fields[name] = live


def _templates(cluster: Manifest) -> Iterator[Manifest]:
    spec = cluster["spec"]
    yield spec["headGroupSpec"]["template"]
    for group in spec.get("workerGroupSpecs") or ():
        yield group["template"]


def _holders(manifest: Manifest) -> Iterator[str]:
    managed = manifest["metadata"].get("managedFields") or ()
    return (str(entry["manager"]) for entry in managed if controls_suspend(entry))


def _spec_fields(entry: Manifest) -> dict[str, Any]:
    fields: dict[str, Any] = (entry.get("fieldsV1") or {}).get("f:spec") or {}
    return fields


def _labels(manifest: Manifest) -> dict[str, str]:
    return manifest["metadata"].get("labels") or {}
