"""Who may write which field of an object, as the API server books it in `metadata.managedFields`.

What somebody else adds beside our fields (another key of a Service's selector, another port) is theirs by that book,
and no apply of ours removes it. So where others have written into the content of an object that is all ours, the book
is corrected first: their fields become ours, and the apply that follows, which does not name them, takes them away.
"""

from __future__ import annotations

from typing import Any

from tinsmith_operator.model.base import Manifest
from tinsmith_operator.model.names import MANAGER

CONTENT = frozenset({"f:spec", "f:data", "f:stringData", "f:type"})
"""Labels and annotations of others may stay beside ours."""

SHARED_KINDS = frozenset({"PersistentVolumeClaim"})
"""Their content is written by controllers too: the volume that a claim is bound to."""


def others_hold_content(manifest: Manifest) -> bool:
    """Whether somebody else wrote into the content of an object that is all ours."""
    if manifest["kind"] in SHARED_KINDS:
        return False
    managed = manifest["metadata"].get("managedFields", [])
    return any(_is_others(entry) and CONTENT & entry.get("fieldsV1", {}).keys() for entry in managed)


def spec_fields_of_ours(manifest: Manifest) -> frozenset[str]:
    """Those that we have named, in a POST or in an apply, and that an apply without them would take away."""
    managed = manifest["metadata"].get("managedFields", [])
    spec = (entry.get("fieldsV1", {}).get("f:spec", {}) for entry in managed if _is_ours(entry))
    return frozenset(name.removeprefix("f:") for fields in spec for name in fields)


def taken_over(manifest: Manifest) -> list[Manifest]:
    """The managed fields as they must be before an apply: all that is ours in one entry, of an apply.

    A POST of ours is booked as an update, which nobody repeats: what it named, and an apply no longer does, would stay.
    """
    managed: list[Manifest] = manifest["metadata"].get("managedFields", [])
    takes_content = manifest["kind"] not in SHARED_KINDS
    mine: Manifest | None = None
    rest: list[Manifest] = []
    for entry in managed:
        if _is_ours(entry):
            mine = _with_fields({**entry, "operation": "Apply"}, entry.get("fieldsV1", {}), mine)
            continue
        fields = entry.get("fieldsV1", {})
        theirs = {name: tree for name, tree in fields.items() if name in CONTENT}
        if not (takes_content and _is_others(entry) and theirs):
            rest.append(entry)
            continue
        mine = _with_fields(mine or {**entry, "manager": MANAGER, "operation": "Apply"}, theirs, mine)
        if left := {name: tree for name, tree in fields.items() if name not in theirs}:
            rest.append({**entry, "fieldsV1": left})
    return rest if mine is None else [mine, *rest]


def _with_fields(entry: Manifest, fields: dict[str, Any], known: Manifest | None) -> Manifest:
    return {**entry, "fieldsV1": _union(known["fieldsV1"] if known is not None else {}, fields)}


def _union(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    both = {name: _union(one[name], other[name]) for name in one.keys() & other.keys()}
    return {**one, **other, **both}


def _is_ours(entry: Manifest) -> bool:
    return entry.get("manager") == MANAGER and not entry.get("subresource")


def _is_others(entry: Manifest) -> bool:
    return entry.get("manager") != MANAGER and not entry.get("subresource")
