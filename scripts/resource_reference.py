"""The tables of the fields of TrainingSessions and SamplerPools, from their CRDs, and of conditions and reasons, from
the operator.

`reference.py` calls it, and puts them into docs/reference/training-session.md, docs/reference/sampler-pool.md and
docs/reference/conditions.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from tinsmith_operator.api.conditions import ConditionType
from tinsmith_operator.api.reasons import Progress, Reason

Schema = dict[str, Any]

# Parts of Kubernetes' own objects, which its documentation explains; a row for the whole is enough.
WHOLE = frozenset({"spec.pod.affinity", "status.conditions"})


def field_rows(crd: Path, part: str) -> Iterator[tuple[str, ...]]:
    """Of `spec` or `status`: field, type, default, meaning."""
    (version,) = yaml.safe_load(crd.read_text())["spec"]["versions"]
    schema = version["schema"]["openAPIV3Schema"]["properties"][part]
    for place, field, is_required in _walk(schema, part):
        yield f"`{place}`", _type_of(field), _default_of(field, is_required), _meaning_of(field)


def status_rows(crd: Path) -> Iterator[tuple[str, ...]]:
    return ((place, kind, meaning) for place, kind, _, meaning in field_rows(crd, "status"))


def condition_rows() -> Iterator[tuple[str, ...]]:
    return ((f"`{condition}`", condition.meaning) for condition in ConditionType)


def reason_rows(progress: Progress) -> Iterator[tuple[str, ...]]:
    return ((f"`{reason}`", reason.meaning, reason.cure) for reason in Reason if reason.progress is progress)


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
        return f"{field['type']}, {field['minimum']} to {field['maximum']}"
    return "time" if field.get("format") == "date-time" else str(field["type"])


def _plural(field: Schema) -> str:
    return "quantities" if field.get("x-kubernetes-int-or-string") else f"{field['type']}s"


def _default_of(field: Schema, is_required: bool) -> str:
    if is_required:
        return "required"
    default = field.get("default")
    if default is None or default == {}:
        return ""
    return f"`{str(default).lower() if isinstance(default, bool) else default}`" if default != "" else '`""`'


def _meaning_of(field: Schema) -> str:
    """Its description, and what its rules demand. What cannot be changed is said by the descriptions."""
    rules = [rule for rule in field.get("x-kubernetes-validations", ()) if "oldSelf" not in rule["rule"]]
    return " ".join([field["description"], *(_sentence(rule["message"]) for rule in rules)])


def _sentence(message: str) -> str:
    return (
        f"{message[0].upper()}{message[1:]}."
        if not message.startswith(("spec.", "metadata."))
        else f"`{_coded(message)}."
    )


def _coded(message: str) -> str:
    """With its leading field in code."""
    field, _, rest = message.partition(" ")
    return f"{field}` {rest}"
