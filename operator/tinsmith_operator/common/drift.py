"""The actions that change a child object of any kind into the desired object: a create or an apply.

An apply removes only fields that `managedFields` records as the operator's fields. So this module also corrects
`managedFields`.

The API server changes an object before it stores the object. The API server rounds quantities, fills in defaults, drops
empty values, and lets admission webhooks rewrite the rest. `holds` knows the conversions that Kubernetes documents. For
all other conversions, `Stored` records what the API server stored for the latest request. If the object is the same as
the recorded object, a second request would change nothing, so the operator sends none.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from tinsmith_operator.api.base import Manifest, parse_quantity
from tinsmith_operator.api.names import MANAGER
from tinsmith_operator.build.metadata import fingerprint
from tinsmith_operator.common.actions import Action, Annotate, Apply, Create, IssueCertificate
from tinsmith_operator.common.observed import Stored, Surroundings
from tinsmith_operator.common.ownership import belongs_to
from tinsmith_operator.common.queue import controls_suspend, is_held, without_suspend

CONTENT = frozenset({"f:spec", "f:data", "f:stringData", "f:type"})
"""The parts of an object that only the operator may change. Other managers may add labels and annotations."""

SHARED_KINDS = frozenset({"PersistentVolumeClaim"})
"""The kinds of objects in which controllers also write fields of the content.

For example, a controller writes the name of the volume into a claim.
"""


def ensure_child(observed: Surroundings, live: Manifest | None, desired: Manifest) -> tuple[Create | Apply, ...]:
    """Return the action that turns the live object into the desired object.

    Return no action if the live object is already as desired, belongs to another owner, or is being deleted.
    """
    if live is None:
        return (Create(desired),)
    if not belongs_to(observed.owner, live) or live["metadata"].get("deletionTimestamp"):
        return ()
    if is_in_place(observed, live, desired) and not has_foreign_content(live):
        return ()
    return (apply_to(live, desired),)


def is_in_place(observed: Surroundings, live: Manifest, desired: Manifest) -> bool:
    """Return whether the live object is as desired, or is what the API server stored for the latest request."""
    return holds(live, desired) or as_stored(desired, live) == observed.stored.get(desired["kind"])


def apply_to(live: Manifest, desired: Manifest) -> Apply:
    return Apply(desired, live["metadata"]["uid"], live["metadata"]["resourceVersion"])


def still_refused(refusals: Mapping[str, str], children: Iterable[Action]) -> dict[str, str]:
    """Return the refusals of objects that must still be written. A change that was reverted needs no request."""
    asked = {action.manifest["kind"] for action in children if isinstance(action, Create | Apply | IssueCertificate)}
    asked |= {action.kind for action in children if isinstance(action, Annotate) and action.desired is not None}
    return {kind: words for kind, words in refusals.items() if kind in asked}


def has_foreign_content(manifest: Manifest) -> bool:
    """Return whether another manager, such as a queue, has written into the content of the operator's object."""
    if manifest["kind"] in SHARED_KINDS:
        return False
    managed = manifest["metadata"].get("managedFields", [])
    return any(_is_foreign_entry(entry) and CONTENT & entry.get("fieldsV1", {}).keys() for entry in managed)


def own_spec_fields(manifest: Manifest) -> frozenset[str]:
    """Return the spec fields that the operator has set.

    If an apply lacked a field that the operator has set, the API server would remove the field.
    """
    managed = manifest["metadata"].get("managedFields", [])
    spec = (entry.get("fieldsV1", {}).get("f:spec", {}) for entry in managed if _is_own_entry(entry))
    return frozenset(name.removeprefix("f:") for fields in spec for name in fields)


def own_managed_fields(manifest: Manifest) -> list[Manifest]:
    """Return the managed fields that the object must have before an apply.

    All fields of the operator are in one Apply entry.

    The API server records a POST of the operator as an Update. An apply does not remove fields that only an Update
    entry records.
    """
    managed: list[Manifest] = manifest["metadata"].get("managedFields", [])
    takes_content = manifest["kind"] not in SHARED_KINDS
    held = is_held(manifest)
    mine: Manifest | None = None
    rest: list[Manifest] = []
    for entry in managed:
        if _is_own_entry(entry):
            own = without_suspend(entry) if held else entry
            mine = _with_fields({**own, "operation": "Apply"}, own.get("fieldsV1", {}), mine)
            continue
        fields = entry.get("fieldsV1", {})
        content = {name: tree for name, tree in fields.items() if name in CONTENT}
        if not (takes_content and _is_foreign_entry(entry) and content):
            rest.append(entry)
            continue
        mine = _with_fields(mine or {**entry, "manager": MANAGER, "operation": "Apply"}, content, mine)
        if left := {name: tree for name, tree in fields.items() if name not in content}:
            rest.append({**entry, "fieldsV1": left})
    return rest if mine is None else [mine, *rest]


def _with_fields(entry: Manifest, fields: dict[str, Any], known: Manifest | None) -> Manifest:
    return {**entry, "fieldsV1": _union(known["fieldsV1"] if known is not None else {}, fields)}


def _union(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    both = {name: _union(one[name], other[name]) for name in one.keys() & other.keys()}
    return {**one, **other, **both}


def _is_own_entry(entry: Manifest) -> bool:
    return entry.get("manager") == MANAGER and not entry.get("subresource")


def _is_foreign_entry(entry: Manifest) -> bool:
    return entry.get("manager") != MANAGER and not entry.get("subresource") and not controls_suspend(entry)


LIST_KEYS = {
    "containers": "name",
    "env": "name",
    "imagePullSecrets": "name",
    "ownerReferences": "uid",
    "ports": "name",
    "volumeMounts": "mountPath",
    "volumes": "name",
}
"""The lists that other managers may extend, with the key field of the items.

Lists that other managers may not extend must be equal.
"""

MILLI, NANO = 3, 9
QUANTITY_DIGITS = {"requests": MILLI, "limits": MILLI, "sizeLimit": NANO, "divisor": NANO}
"""The number of digits after the decimal point of a quantity that the API server stores.

The API server rounds quantities away from zero.
"""

APART = frozenset({"metadata", "status"})
"""The parts of an object that are not compared as a whole.

Controllers write the status, and only the desired fields of the metadata are compared.
"""


def holds(live: Any, desired: Any, field: str = "") -> bool:
    """Return whether the live value contains the whole desired value."""
    if isinstance(desired, dict):
        return _holds_fields(live, desired, field)
    if isinstance(desired, list):
        return _holds_items(live, desired, field)
    if field in QUANTITY_DIGITS and live is not None:
        return _stored_quantity(live, field) == _stored_quantity(desired, field)
    # The API server drops an empty text, for example a variable's value or a toleration's key.
    return bool(live == desired) or (live is None and desired == "")


def _holds_fields(live: Any, desired: dict[str, Any], field: str) -> bool:
    if not desired:
        return live is None or isinstance(live, dict)
    if not isinstance(live, dict):
        return False
    # A quantity's conversion depends on the map that holds it, not on the name of the resource.
    return all(
        holds(live.get(name), value, field if field in QUANTITY_DIGITS else name) for name, value in desired.items()
    )


def _holds_items(live: Any, desired: list[Any], field: str) -> bool:
    if not desired:
        return not live
    if not isinstance(live, list):
        return False
    key = LIST_KEYS.get(field)
    if key is not None and all(isinstance(item, dict) and key in item for item in desired):
        by_key = {item.get(key): item for item in live}
        return all(holds(by_key.get(item[key]), item) for item in desired)
    return len(live) == len(desired) and all(holds(*pair) for pair in zip(live, desired, strict=True))


def _stored_quantity(quantity: int | float | str, field: str) -> int:
    """Return the quantity as a whole number of the field's smallest unit."""
    return math.ceil(parse_quantity(quantity).scaleb(QUANTITY_DIGITS[field]))


def with_answer(stored: Mapping[str, Stored], request: Manifest, answer: Manifest) -> dict[str, Stored]:
    """Return `stored`, extended by the API server's answer if the answer lacks a part of the request."""
    others = {kind: each for kind, each in stored.items() if kind != request["kind"]}
    return others if holds(answer, request) else {**others, request["kind"]: as_stored(request, answer)}


def as_stored(request: Manifest, live: Manifest) -> Stored:
    return Stored(
        # Each request generates new content for a certificate's Secret, so the content is not compared.
        request=fingerprint(_without(request, {"data"})),
        content=fingerprint([_without(live, APART), _metadata(request, live)]),
    )


def _without(manifest: Manifest, names: Collection[str]) -> Manifest:
    return {name: value for name, value in manifest.items() if name not in names}


def _metadata(request: Manifest, live: Manifest) -> Manifest:
    found = live["metadata"]
    return {name: _only(found.get(name), value) for name, value in request["metadata"].items()}


def _only(found: Any, requested: Any) -> Any:
    """Return only the labels or annotations that were requested. Return any other value unchanged."""
    return {name: found.get(name) for name in requested} if isinstance(requested, dict) and found else found
