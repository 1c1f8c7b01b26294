"""What each set of values makes, whole. `WRITE_GOLDEN=1 pytest tests/charts` writes it anew, for a reviewer to read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml
from support.kubernetes.charts import ROOT, Object, render

HERE = Path(__file__).parent
CASES = sorted([*HERE.glob("values/*.yaml"), *ROOT.glob("examples/values-*.yaml")])


def case_id(case: Path) -> str:
    return case.stem


def comparable(objects: list[Object]) -> list[Object]:
    """Without what is a file of its own: the definitions, and the dashboards."""
    kept = [each for each in objects if each["kind"] != "CustomResourceDefinition"]
    for each in kept:
        if each["kind"] == "ConfigMap" and each["metadata"]["name"].endswith("-dashboards"):
            each["data"] = sorted(each["data"])
    return kept


class Dumper(yaml.SafeDumper):
    """Scripts as blocks, to be read."""


def as_block(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


Dumper.add_representer(str, as_block)


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_values_make_these_objects_and_no_others(case: Path) -> None:
    objects = comparable(render(yaml.safe_load(case.read_text())))
    golden = HERE / "golden" / case.name
    if os.environ.get("WRITE_GOLDEN"):
        golden.write_text(yaml.dump_all(objects, Dumper=Dumper, sort_keys=False, width=120))
    assert objects == list(yaml.safe_load_all(golden.read_text()))


def test_every_golden_file_has_its_values() -> None:
    assert {path.name for path in HERE.glob("golden/*.yaml")} == {case.name for case in CASES}
