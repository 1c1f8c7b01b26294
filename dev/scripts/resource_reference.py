"""The rows for the fields of TrainingSessions and SamplerPools. The rows come from the CRDs.

`reference.py` calls this module, and writes docs/reference/training-session.md and docs/reference/sampler-pool.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

Schema = dict[str, Any]

# Objects of Kubernetes itself, which its documentation explains, requests and internal state: one row is enough.
WHOLE = frozenset(
    {
        "spec.model.source.hub.tokenSecretRef",
        "spec.pod.affinity",
        "spec.pod.env",
        "spec.pod.imagePullSecrets",
        "spec.pod.tolerations",
        "spec.pod.topologySpreadConstraints",
        "status.conditions",
        "status.group",
        "status.requests",
        "status.template",
        "status.restarts.counted",
    }
)

EFFECT = re.compile(r" (Immutable (after|while|once)|A change (restarts|rolls))[^.]*\.")


def field_rows(crd: Path, part: str) -> Iterator[tuple[str, ...]]:
    """Yield the rows of `spec` or `status`: field, type, default and meaning."""
    (version,) = yaml.safe_load(crd.read_text())["spec"]["versions"]
    schema = version["schema"]["openAPIV3Schema"]["properties"][part]
    for place, field, is_required in _walk(schema, part):
        yield f"`{place}`", _type_of(field), _default_of(field, is_required), str(field["description"])


def spec_rows(crd: Path, other: Path | None = None) -> Iterator[tuple[str, ...]]:
    """Yield the rows of `spec`. Rows that `other` also has are left out.

    The effect of a change is left out, too, because the pages contain a table of effects.
    """
    shared = set(field_rows(other, "spec")) if other else set()
    for row in field_rows(crd, "spec"):
        if row not in shared:
            *cells, meaning = row
            yield *cells, EFFECT.sub("", meaning)


def status_rows(crd: Path) -> Iterator[tuple[str, ...]]:
    """Yield each field and the meaning of the field. `kubectl explain` shows the types and the internal fields."""
    for place, _, _, meaning in field_rows(crd, "status"):
        if not meaning.startswith("Internal"):
            yield place, meaning


def _walk(schema: Schema, path: str) -> Iterator[tuple[str, Schema, bool]]:
    for name, field in schema.get("properties", {}).items():
        place = f"{path}.{name}"
        yield place, field, name in schema.get("required", ())
        if place not in WHOLE:
            yield from _walk(field, place)
            yield from _walk(field.get("items", {}), f"{place}[]")


def _type_of(field: Schema) -> str:
    if "enum" in field:
        return ", ".join(f"`{choice}`" for choice in field["enum"])
    if field.get("x-kubernetes-int-or-string"):
        return "quantity"
    if isinstance(field.get("additionalProperties"), dict):
        return f"map of {_plural(field['additionalProperties'])}"
    if field["type"] == "array":
        return f"list of {_plural(field['items'])}"
    if {"minimum", "maximum"} <= field.keys():
        return f"{field['minimum']} to {field['maximum']}"
    kind = "time" if field.get("format") == "date-time" else str(field["type"])
    return "" if kind == "object" else kind


def _plural(field: Schema) -> str:
    return "quantities" if field.get("x-kubernetes-int-or-string") else f"{field['type']}s"


def _default_of(field: Schema, is_required: bool) -> str:
    if is_required:
        return "required"
    default = field.get("default")
    if default is None or default == {}:
        return ""
    return f"`{str(default).lower() if isinstance(default, bool) else default}`" if default != "" else '`""`'
