"""Fields of a workload that another manager owns by contract: a queue, such as Kueue, says when it runs, and where.

Whoever carries the queue's label belongs to it, and so does whose `spec.suspend` somebody else has written. The
operator then neither sets nor reverts that field, nor what a queue adds to templates when it admits them: two that each
wrote what they want would do so for ever. What shall not run for a reason of the operator's own is deleted instead, and
made anew when it shall.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from tinsmith_operator.api.base import Manifest
from tinsmith_operator.api.names import MANAGER, QUEUE_LABEL

SUSPEND = "f:suspend"

PLACEMENT = ("nodeSelector", "tolerations", "schedulingGates")
"""Of a template's spec: where the nodes are on which the queue has found room."""
MARKS = ("labels", "annotations")
"""Of a template's metadata: by which the queue knows its pods again."""


def is_held(manifest: Manifest) -> bool:
    """Whether another manager says when it runs."""
    return QUEUE_LABEL in _labels(manifest) or next(_holders(manifest), None) is not None


def holder_name(manifest: Manifest) -> str:
    """Who that is."""
    if (queue := _labels(manifest).get(QUEUE_LABEL)) is not None:
        return f"queue {queue}"
    manager = next(_holders(manifest), None)
    return f"field manager {manager}" if manager is not None else "another manager"


def controls_suspend(entry: Manifest) -> bool:
    """Whether these managed fields are of another manager that says when it runs."""
    return entry.get("manager") != MANAGER and not entry.get("subresource") and SUSPEND in _spec_fields(entry)


def without_suspend(entry: Manifest) -> Manifest:
    """Managed fields of ours without the one that is another's by contract. An admission webhook writes it into our own
    request, so it is booked as ours; an apply that no longer names it would take it away, and pods would start.
    """
    if SUSPEND not in _spec_fields(entry):
        return entry
    left = {name: tree for name, tree in _spec_fields(entry).items() if name != SUSPEND}
    return {**entry, "fieldsV1": {**entry["fieldsV1"], "f:spec": left}}


def keep_queue_fields(live: Manifest, wanted: Manifest) -> Manifest:
    """What is wanted of a RayCluster, as far as its queue leaves that to us."""
    held = copy.deepcopy(wanted)
    held["spec"].pop("suspend", None)
    for theirs, ours in zip(_templates(live), _templates(held), strict=False):
        _keep(theirs.get("metadata") or {}, ours["metadata"], MARKS)
        _keep(theirs.get("spec") or {}, ours["spec"], PLACEMENT)
    return held


def _keep(theirs: Manifest, ours: Manifest, fields: tuple[str, ...]) -> None:
    """A map has both, and ours wins. A list is theirs: ours is in it, since a change of ours makes the whole anew."""
    for name in fields:
        live = theirs.get(name)
        if isinstance(live, dict):
            ours[name] = {**live, **ours.get(name, {})}
        elif live:
            ours[name] = live


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
