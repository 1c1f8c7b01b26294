"""Whether a live object already is what is wanted, although the API server does not store it as it was sent.

It rounds quantities, fills in defaults, leaves out what is empty, and lets admission webhooks rewrite the rest. `holds`
knows the forms that Kubernetes documents. For every other form, `Stored` remembers what the latest request came to:
sending the same request to an object that still reads like its answer would change nothing.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from tinsmith_operator.api.base import Manifest, parse_quantity
from tinsmith_operator.build.metadata import fingerprint

LIST_KEYS = {
    "containers": "name",
    "env": "name",
    "imagePullSecrets": "name",
    "ownerReferences": "uid",
    "ports": "name",
    "volumeMounts": "mountPath",
    "volumes": "name",
}
"""Lists in which others may have items too. All other lists must be equal in length and order."""

MILLI, NANO = 3, 9
QUANTITY_DIGITS = {"requests": MILLI, "limits": MILLI, "sizeLimit": NANO, "divisor": NANO}
"""The digits after the point that the API server keeps of a quantity; it rounds away from zero."""

APART = frozenset({"metadata", "status"})
"""Controllers write the status. Of the metadata, only what was asked for is compared."""


def holds(live: Any, wanted: Any, field: str = "") -> bool:
    """Whether everything wanted is in what is live."""
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
    # A resource's name says nothing about its value; the map that it is in does.
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


@dataclass(frozen=True)
class Stored:
    """asked: the hash of a request. content: the hash of the object after it, without what others write."""

    asked: str
    content: str


def with_answer(stored: Mapping[str, Stored], asked: Manifest, answer: Manifest) -> dict[str, Stored]:
    """Add what the API server made of a request, where that is not visibly what was asked for. By kind."""
    others = {kind: each for kind, each in stored.items() if kind != asked["kind"]}
    return others if holds(answer, asked) else {**others, asked["kind"]: as_stored(asked, answer)}


def as_stored(asked: Manifest, live: Manifest) -> Stored:
    return Stored(
        # The content of a certificate's Secret is made with each request, and is no part of what is wanted.
        asked=fingerprint(_without(asked, {"data"})),
        content=fingerprint([_without(live, APART), _metadata(asked, live)]),
    )


def _without(manifest: Manifest, names: Collection[str]) -> Manifest:
    return {name: value for name, value in manifest.items() if name not in names}


def _metadata(asked: Manifest, live: Manifest) -> Manifest:
    found = live["metadata"]
    return {name: _only(found.get(name), value) for name, value in asked["metadata"].items()}


def _only(found: Any, wanted: Any) -> Any:
    """Return the labels or annotations that were asked for; any other value as it is."""
    return {name: found.get(name) for name in wanted} if isinstance(wanted, dict) and found else found
