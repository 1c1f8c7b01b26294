"""`.ci/run` installs everything that a test requires, so that it is green on a bare machine."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from package_environment import FOR_TESTS
from support.requirements import InstalledBy

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
CI_RUN = ROOT / ".ci" / "run"
"""Modules that may name package environments without `require_environment`."""


def make_targets() -> set[str]:
    """Return the make targets of the stages in `.ci/run`."""
    stages = re.findall(r"^ *stage \"[^\"]+\" (.+)$", CI_RUN.read_text(), re.MULTILINE)
    return {
        word
        for stage in stages
        for word in re.findall(r"(?:make|side_by_side\.py) ([a-z -]+)", stage)
        for word in word.split()
    }


def calls(name: str) -> Iterator[tuple[Path, ast.Call]]:
    for path in sorted(TESTS.rglob("*.py")):
        source = path.read_text()
        if f"{name}(" not in source:
            continue
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name:
                yield path, node


@pytest.mark.parametrize("target", InstalledBy)
def test_every_target_that_installs_a_requirement_of_a_test_is_a_stage(target: InstalledBy) -> None:
    assert target in make_targets()


def test_each_package_environment_that_a_test_requires_is_installed() -> None:
    required = {ast.literal_eval(call.args[0]) for _, call in calls("require_environment")}
    assert required == {packages.name for packages in FOR_TESTS}


def test_make_has_every_target_of_a_stage() -> None:
    names = sorted(make_targets())
    listed = subprocess.run(
        ["make", "--dry-run", "--question", *names], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert "No rule to make target" not in listed.stderr
