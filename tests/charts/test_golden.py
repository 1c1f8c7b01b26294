"""The objects that each set of values makes: those of the defaults in full, the others as differences from them.

`make golden` writes the files, for a reviewer to read.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from support.golden import assert_golden
from support.kubernetes.charts import ROOT, Object, render

HERE = Path(__file__).parent
DEFAULT = HERE / "values" / "default.yaml"
CASES = sorted({*HERE.glob("values/*.yaml"), *ROOT.glob("examples/values-*.yaml")} - {DEFAULT})


def comparable(values: Path) -> list[Object]:
    """Return the objects, without the definitions and the dashboards, which are files of their own."""
    objects = render(yaml.safe_load(values.read_text()))
    kept = [each for each in objects if each["kind"] != "CustomResourceDefinition"]
    for each in kept:
        if each["kind"] == "ConfigMap" and each["metadata"]["name"].endswith("-dashboards"):
            each["data"] = sorted(each["data"])
    return kept


def test_the_defaults_make_these_objects_and_no_others() -> None:
    assert_golden(HERE / "golden" / "default.yaml", comparable(DEFAULT))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.stem)
def test_values_make_these_differences_and_no_others(case: Path) -> None:
    assert_golden(HERE / "golden" / f"{case.stem}.diff", comparable(case), comparable(DEFAULT))


def test_every_golden_file_has_its_values() -> None:
    assert {path.stem for path in HERE.glob("golden/*.diff")} == {case.stem for case in CASES}
