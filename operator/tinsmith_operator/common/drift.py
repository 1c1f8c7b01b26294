"""The create or apply that changes a child, of any kind, into the desired object.

An apply removes only fields that `managedFields` records as the operator's, so these records are corrected here too.

The API server does not store an object as it was sent. It rounds quantities, fills in defaults, leaves out what is
empty, and lets admission webhooks rewrite the rest. `holds` knows the forms that Kubernetes documents. For all other
forms, `Stored` records what the latest request came to: the same request to an object that still reads like the answer
would change nothing.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from tinsmith_operator.api.base import Manifest, parse_quantity
from tinsmith_operator.api.names import MANAGER
from tinsmith_operator.build.metadata import fingerprint
from tinsmith_operator.common.actions import Action, Apply, Create, IssueCertificate
from tinsmith_operator.common.observed import Stored, Surroundings
from tinsmith_operator.common.ownership import belongs_to
from tinsmith_operator.common.queue import controls_suspend, is_held, without_suspend

CONTENT = frozenset({"f:spec", "f:data", "f:stringData", "f:type"})
"""The parts of an object that belong to the operator alone. Other managers may add labels and annotations."""

SHARED_KINDS = frozenset({"PersistentVolumeClaim"})
"""The kinds whose content controllers write too: the volume that a claim is bound to."""


def ensure_child(observed: Surroundings, live: Manifest | None, wanted: Manifest) -> tuple[Create | Apply, ...]:
    """Return no action if the live object is as desired, is foreign, or is being deleted."""
    if live is None:
        return (Create(wanted),)
    if not belongs_to(observed.owner, live) or live["metadata"].get("deletionTimestamp"):
        return ()
    if is_in_place(observed, live, wanted) and not has_foreign_content(live):
        return ()
    return (apply_to(live, wanted),)


def is_in_place(observed: Surroundings, live: Manifest, wanted: Manifest) -> bool:
    """Return whether the live object is as desired, or as the API server stored the latest request for it."""
    return holds(live, wanted) or as_stored(wanted, live) == observed.stored.get(wanted["kind"])


def apply_to(live: Manifest, wanted: Manifest) -> Apply:
    return Apply(wanted, live["metadata"]["uid"], live["metadata"]["resourceVersion"])


def still_refused(refusals: Mapping[str, str], children: Iterable[Action]) -> dict[str, str]:
    """Return the refusals of objects that are still to be written. A change that was taken back needs no request."""
    asked = {action.manifest["kind"] for action in children if isinstance(action, Create | Apply | IssueCertificate)}
    return {kind: words for kind, words in refusals.items() if kind in asked}


def has_foreign_content(manifest: Manifest) -> bool:
    """Return whether another manager wrote into the content of an object of the operator. A queue may do that."""
    if manifest["kind"] in SHARED_KINDS:
        return False
    managed = manifest["metadata"].get("managedFields", [])
    return any(_is_foreign_entry(entry) and CONTENT & entry.get("fieldsV1", {}).keys() for entry in managed)


def own_spec_fields(manifest: Manifest) -> frozenset[str]:
    """Return the fields of the spec that the operator has set, and that an apply without them would remove."""
    managed = manifest["metadata"].get("managedFields", [])
    spec = (entry.get("fieldsV1", {}).get("f:spec", {}) for entry in managed if _is_own_entry(entry))
    return frozenset(name.removeprefix("f:") for fields in spec for name in fields)


def own_managed_fields(manifest: Manifest) -> list[Manifest]:
    """Return the managed fields as they must be before an apply: all fields of the operator in one Apply entry.

    The operator's POST is recorded as an Update. Fields of that entry would stay when an apply no longer names them.
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
"""The lists that other managers may extend, with the key of their items. All other lists must be equal."""

MILLI, NANO = 3, 9
QUANTITY_DIGITS = {"requests": MILLI, "limits": MILLI, "sizeLimit": NANO, "divisor": NANO}
"""The digits after the point that the API server stores of a quantity. It rounds away from zero."""

APART = frozenset({"metadata", "status"})
"""The parts that are not compared whole. Controllers write the status; of the metadata only desired fields count."""


def holds(live: Any, wanted: Any, field: str = "") -> bool:
    """Return whether the live value has everything that the desired value has."""
    if isinstance(wanted, dict):
        return _holds_fields(live, wanted, field)
    if isinstance(wanted, list):
        return _holds_items(live, wanted, field)
    if field in QUANTITY_DIGITS and live is not None:
        return _stored_quantity(live, field) == _stored_quantity(wanted, field)
    # The API server leaves out a text that is empty: a variable's value, a toleration's key.
    return bool(live == wanted) or (live is None and wanted == "")


def _holds_fields(live: Any, wanted: dict[str, Any], field: str) -> bool:
    if not wanted:
        return live is None or isinstance(live, dict)
    if not isinstance(live, dict):
        return False
    # The map of a resource decides how its value is stored, and its name does not.
    return all(
        holds(live.get(name), value, field if field in QUANTITY_DIGITS else name) for name, value in wanted.items()
    )


def _holds_items(live: Any, wanted: list[Any], field: str) -> bool:
    if not wanted:
        return not live
    if not isinstance(live, list):
        return False
    key = LIST_KEYS.get(field)
    if key is not None and all(isinstance(item, dict) and key in item for item in wanted):
        by_key = {item.get(key): item for item in live}
        return all(holds(by_key.get(item[key]), item) for item in wanted)
    return len(live) == len(wanted) and all(holds(*pair) for pair in zip(live, wanted, strict=True))


def _stored_quantity(quantity: int | float | str, field: str) -> int:
    """Return the quantity as a multiple of the smallest amount that the field can hold."""
    return math.ceil(parse_quantity(quantity).scaleb(QUANTITY_DIGITS[field]))


def with_answer(stored: Mapping[str, Stored], asked: Manifest, answer: Manifest) -> dict[str, Stored]:
    """Return `stored` with the answer to a request, if the answer does not hold what was requested."""
    others = {kind: each for kind, each in stored.items() if kind != asked["kind"]}
    return others if holds(answer, asked) else {**others, asked["kind"]: as_stored(asked, answer)}


def as_stored(asked: Manifest, live: Manifest) -> Stored:
    return Stored(
        # The content of a certificate's Secret is made anew for each request, so it is not compared.
        asked=fingerprint(_without(asked, {"data"})),
        content=fingerprint([_without(live, APART), _metadata(asked, live)]),
    )


def _without(manifest: Manifest, names: Collection[str]) -> Manifest:
    return {name: value for name, value in manifest.items() if name not in names}


def _metadata(asked: Manifest, live: Manifest) -> Manifest:
    found = live["metadata"]
    return {name: _only(found.get(name), value) for name, value in asked["metadata"].items()}


def _only(found: Any, wanted: Any) -> Any:
    """Return the labels or annotations that were requested; any other value as it is."""
    return {name: found.get(name) for name in wanted} if isinstance(wanted, dict) and found else found
