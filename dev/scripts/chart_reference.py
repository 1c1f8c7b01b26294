"""The derived files of the chart: values.yaml and values.schema.json from values.schema.yaml, and a copy of the CRDs.

`reference.py` calls this module, and writes the table of values into docs/reference/chart.md.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import artifact_hub
import yaml
from template_crd import template_crd

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "tinsmith"
SOURCE = CHART / "values.schema.yaml"
CRDS = ROOT / "crds"
SESSION_CRD = CRDS / "tinsmith.dev_trainingsessions.yaml"
POOL_CRD = CRDS / "tinsmith.dev_samplerpools.yaml"
TEMPLATE_CRD = CRDS / "tinsmith.dev_sessiontemplates.yaml"
COMMENT_WIDTH = 110

# Keywords with nested schemas: by name, by position, and directly.
SCHEMA_MAPS = ("properties", "definitions")
SCHEMA_LISTS = ("allOf", "anyOf", "oneOf")
SCHEMAS = ("items", "additionalProperties", "not")

SERVER_SETTINGS = "apiServer.settings."

Schema = dict[str, Any]


class Value(NamedTuple):
    """One value of the chart, with its dotted path. NONE means that the value has no default."""

    path: str
    default: Any
    description: str


NONE = object()


def refresh(*, check: bool) -> list[str]:
    """Return the files that differ from their sources. If `check` is false, write the files that differ."""
    stale = [path for path, content in generated_files().items() if not path.exists() or path.read_text() != content]
    if not check:
        for path in stale:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(generated_files()[path])
    return [path.relative_to(ROOT).as_posix() for path in stale]


def generated_files() -> dict[Path, str]:
    definitions = {SESSION_CRD: SESSION_CRD.read_text(), POOL_CRD: POOL_CRD.read_text()}
    definitions[TEMPLATE_CRD] = template_crd(SESSION_CRD)
    return {
        TEMPLATE_CRD: definitions[TEMPLATE_CRD],
        CHART / "Chart.yaml": artifact_hub.chart_file(),
        CHART / "values.yaml": values_file(),
        CHART / "values.schema.json": json.dumps(chart_schema(), indent=2) + "\n",
        **{CHART / "files" / "crds" / crd.name: text for crd, text in definitions.items()},
    }


# ---- the schema that Helm reads


def chart_schema() -> Schema:
    """Return the schema of the chart. Objects allow no unknown properties."""
    return required(closed(yaml.safe_load(SOURCE.read_text())), yaml.safe_load(values_file()))


def closed(schema: Schema) -> Schema:
    """Return the schema. An object with named properties allows no other properties."""
    schema = _descend(schema, closed)
    if "properties" in schema and "additionalProperties" not in schema:
        schema["additionalProperties"] = False
    return schema


def required(schema: Schema, defaults: Any) -> Schema:
    """Make each value with a default a required value.

    Templates rely on values with a default; only `null` removes such a value.
    """
    if not defaults or "properties" not in schema:
        return schema
    properties = {name: required(each, defaults.get(name)) for name, each in schema["properties"].items()}
    return {**schema, "required": [name for name in properties if name in defaults], "properties": properties}


def _descend(schema: Schema, change: Any) -> Schema:
    changed = dict(schema)
    for key, value in schema.items():
        if key in SCHEMA_MAPS:
            changed[key] = {name: change(each) for name, each in value.items()}
        elif key in SCHEMA_LISTS:
            changed[key] = [change(each) for each in value]
        elif key in SCHEMAS and isinstance(value, dict):
            changed[key] = change(value)
    return changed


# ---- the values that people read


def values_file() -> str:
    schema = yaml.safe_load(SOURCE.read_text())
    head = "# Written by `make docs` from values.schema.yaml, which says more about types.\n"
    return head + "".join(_value_lines(schema, schema, depth=0))


def _value_lines(parent: Schema, root: Schema, depth: int) -> Iterator[str]:
    indent = "  " * depth
    for name, written in parent["properties"].items():
        schema = resolved(written, root)
        if name == "global":
            continue
        if depth == 0:
            yield "\n"
        yield from (f"{indent}# {line}\n" for line in _comment(schema, COMMENT_WIDTH - len(indent)))
        if "default" in schema:
            yield textwrap.indent(_dumped(name, schema["default"]), indent)
            yield from _optional_lines(schema, root, indent)
        elif "properties" in schema:
            yield f"{indent}{name}:\n"
            yield from _value_lines(schema, root, depth + 1)


def _dumped(name: str, value: Any) -> str:
    return yaml.safe_dump({name: value}, sort_keys=False, width=1000).replace(": ''\n", ': ""\n')


def _optional_lines(schema: Schema, root: Schema, indent: str) -> Iterator[str]:
    """Yield commented lines with the possible fields of an object that is empty by default."""
    if schema["default"] == {} and "properties" in schema:
        for name, written in schema["properties"].items():
            if description := resolved(written, root).get("description"):
                yield f"{indent}#   {name}: {description}\n"


def _comment(schema: Schema, width: int) -> list[str]:
    return textwrap.wrap(schema["description"], width, break_on_hyphens=False)


# ---- the reference


Row = tuple[str, str, str]


def values_rows(sections: Collection[str]) -> list[Row]:
    """Return the Markdown rows with value, default and meaning for the values of these sections.

    The server's settings are left out, because docs/reference/settings.md lists these settings. The values in
    `shared_rows` are also left out.
    """
    shared = {value.path for pair in _shared_values() for value in pair}
    return [
        (f"`{value.path}`", _shown(value.default), value.description)
        for value in values()
        if _section_of(value) in sections and not value.path.startswith(SERVER_SETTINGS) and value.path not in shared
    ]


def shared_rows() -> list[Row]:
    """Return the rows of values that have the same default and meaning for the operator and the API server."""
    return [
        (f"`*{operator.path.removeprefix('operator')}`", _shown(operator.default), operator.description)
        for operator, _ in _shared_values()
    ]


def _shared_values() -> list[tuple[Value, Value]]:
    found = {value.path: value for value in values()}
    pairs = [
        (value, found.get(path.replace("operator.", "apiServer.", 1)))
        for path, value in found.items()
        if path.startswith("operator.")
    ]
    return [(operator, server) for operator, server in pairs if server is not None and server[1:] == operator[1:]]


def other_sections() -> set[str]:
    """Return all sections except the sections of the operator and of the API server, which have separate tables."""
    return {_section_of(value) for value in values()} - {"operator", "apiServer"}


def _section_of(value: Value) -> str:
    return value.path.partition(".")[0].removesuffix("[]")


def values() -> list[Value]:
    schema = yaml.safe_load(SOURCE.read_text())
    return list(_values_of(schema, schema, ""))


def _values_of(parent: Schema, root: Schema, prefix: str) -> Iterator[Value]:
    for name, written in parent["properties"].items():
        schema, path = resolved(written, root), f"{prefix}{name}"
        has_parts = "properties" in schema and all(
            "description" in resolved(p, root) for p in schema["properties"].values()
        )
        if not has_parts:
            yield Value(path, schema.get("default", NONE), schema["description"])
            yield from _values_of_items(schema, root, path)
        else:
            yield from _values_of(schema, root, f"{path}.")


def _values_of_items(schema: Schema, root: Schema, path: str) -> Iterator[Value]:
    items = resolved(schema.get("items", {}), root)
    if all("description" in part for part in items.get("properties", {}).values()):
        yield from _values_of({"properties": items.get("properties", {})}, root, f"{path}[].")


def resolved(schema: Schema, root: Schema) -> Schema:
    """Return the schema with the reference resolved.

    Keywords in the schema itself take precedence over keywords in the referenced schema.
    """
    if "$ref" not in schema:
        return schema
    target = root["definitions"][schema["$ref"].removeprefix("#/definitions/")]
    return {**resolved(target, root), **{key: value for key, value in schema.items() if key != "$ref"}}


def _shown(default: Any) -> str:
    return "" if default in (NONE, "") else f"`{json.dumps(default)}`"
