"""The CRDs, read, and installed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml
from testcluster.addons.custom_resources import wait_established, wait_explained

CRDS = Path(__file__).parents[3] / "crds"
CRD_FILE = CRDS / "tinsmith.dev_trainingsessions.yaml"
POOL_CRD_FILE = CRDS / "tinsmith.dev_samplerpools.yaml"
TEMPLATE_CRD_FILE = CRDS / "tinsmith.dev_sessiontemplates.yaml"

Schema = dict[str, Any]


def install_crds(kubectl: Callable[..., str]) -> None:
    """Install the definitions, and wait until objects of each kind can be made."""
    kubectl("apply", "--server-side", f"--filename={CRDS}")
    wait_established(kubectl, f"--filename={CRDS}")
    for kind in ("trainingsessions", "samplerpools", "sessiontemplates"):
        wait_explained(kubectl, f"{kind}.tinsmith.dev")


def load_crd(file: Path = CRD_FILE) -> dict[str, Any]:
    crd: dict[str, Any] = yaml.safe_load(file.read_text())
    return crd


def root_schema(file: Path = CRD_FILE) -> Schema:
    (version,) = load_crd(file)["spec"]["versions"]
    schema: Schema = version["schema"]["openAPIV3Schema"]
    return schema


def walk(schema: Schema, path: str = "") -> Iterator[tuple[str, Schema]]:
    """Every field below, with its path: `spec.pod.env[].name`, `spec.resources.limits.*`."""
    for name, field in schema.get("properties", {}).items():
        place = f"{path}.{name}".lstrip(".")
        yield place, field
        yield from walk(field, place)
    for suffix, member in (("[]", "items"), (".*", "additionalProperties")):
        if isinstance(schema.get(member), dict):
            yield path + suffix, schema[member]
            yield from walk(schema[member], path + suffix)


def fill_defaults(value: Any, schema: Schema) -> Any:
    """Fill in defaults as the API server does when an object arrives."""
    if isinstance(value, dict):
        for name, field in schema.get("properties", {}).items():
            if name not in value and "default" in field:
                value = {**value, name: field["default"]}
        fields = schema.get("properties", {})
        return {name: fill_defaults(each, fields.get(name, {})) for name, each in value.items()}
    return value
