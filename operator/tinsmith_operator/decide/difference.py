"""Whether a live object already is what is wanted, although the API server has added defaults to it."""

from __future__ import annotations

from typing import Any

from tinsmith_operator.model.quantity import parse_quantity

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

QUANTITY_FIELDS = frozenset({"requests", "limits", "sizeLimit"})


def holds(live: Any, wanted: Any, field: str = "") -> bool:
    """Whether everything wanted is in what is live. Quantities are compared by value: the API server rewrites them."""
    if isinstance(wanted, dict):
        return _holds_fields(live, wanted, field)
    if isinstance(wanted, list):
        return _holds_items(live, wanted, field)
    if field in QUANTITY_FIELDS and live is not None:
        return parse_quantity(live) == parse_quantity(wanted)
    # The API server leaves out a text that is empty: a variable's value, a toleration's key.
    return bool(live == wanted) or (live is None and wanted == "")


def _holds_fields(live: Any, wanted: dict[str, Any], field: str) -> bool:
    if not wanted:
        return live is None or isinstance(live, dict)
    if not isinstance(live, dict):
        return False
    # A resource's name says nothing about its value; the map that it is in does.
    return all(
        holds(live.get(name), value, field if field in QUANTITY_FIELDS else name) for name, value in wanted.items()
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
