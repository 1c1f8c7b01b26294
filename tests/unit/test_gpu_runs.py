"""docs/how-to/gpu.md claims a run for no test that is not there, and leaves none out."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import gpu_reference
import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "tests" / "gpu"


def functions_of(file: Path) -> list[str]:
    return [
        f"{file.relative_to(ROOT).as_posix()}::{node.name}"
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]


def test_every_gpu_test_has_a_row_and_every_row_a_test() -> None:
    there = [name for file in sorted(FOLDER.glob("test_*.py")) for name in functions_of(file)]
    rows = [entry["name"] for entry in gpu_reference.entries() if "::" in entry["name"]]
    assert sorted(rows) == sorted(there)


@pytest.mark.parametrize("file", sorted(FOLDER.glob("test_*.py")), ids=lambda file: file.name)
def test_gpu_tests_are_marked_so_that_others_need_no_gpu(file: Path) -> None:
    """The whole file, or single kinds of a server where it has one for a CPU, too."""
    assert re.search(r"pytestmark = \[pytest\.mark\.gpu|marks=pytest\.mark\.gpu", file.read_text())


def test_a_run_names_a_commit_and_a_day() -> None:
    for entry in gpu_reference.entries():
        if "run" in entry:
            assert re.fullmatch(r"[0-9a-f]{7,40}", entry["run"]["commit"]), entry["name"]
            assert re.fullmatch(r"\d{4}-\d\d-\d\d", entry["run"]["date"]), entry["name"]


def test_tests_of_a_file_that_never_ran_share_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "runs.toml"
    file.write_text("".join(f'[[test]]\nname = "x/test_a_b.py::test_{name}"\nneeds = "y"\n' for name in "cd"))
    monkeypatch.setattr(gpu_reference, "RUNS", file)
    assert list(gpu_reference.run_rows()) == [("[2 tests of a b](../../x/test_a_b.py)", "y", "not yet run")]


def test_a_test_that_never_ran_is_listed_as_not_yet_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "runs.toml"
    run = 'run = {device = "H100", commit = "0123abc", date = "2026-11-30"}'
    file.write_text(f'[[test]]\nname = "a::test_b_c"\nneeds = "x"\n[[test]]\nname = "a::test_d"\nneeds = "y"\n{run}\n')
    monkeypatch.setattr(gpu_reference, "RUNS", file)
    assert list(gpu_reference.run_rows()) == [
        ("[b c](../../a)", "x", "not yet run"),
        ("[d](../../a)", "y", "H100, 0123abc"),
    ]
