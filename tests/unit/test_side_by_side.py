"""The order of targets that run at the same time, and the end of the output when one of them failed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "dev" / "scripts" / "side_by_side.py"

FAKE_MAKE = """#!/bin/sh
case "$2" in
fails)
    echo "tests/test_a.py F."
    echo "FAILED tests/test_a.py::test_one - AssertionError: 1 is not 2"
    echo "========= 1 failed, 1 passed in 2 s ========="
    exit 1 ;;
first)
    sleep 0.3
    echo "it has ended" > ended ;;
second)
    cat ended ;;
breaks)
    echo "no such program"
    exit 2 ;;
*)
    sleep 3
    echo "========= 2 passed in 3 s =========" ;;
esac
"""


@pytest.fixture
def make(tmp_path: Path) -> Path:
    path = tmp_path / "make"
    path.write_text(FAKE_MAKE)
    path.chmod(0o755)
    return path


def run(make: Path, *targets: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *targets]
    environment = {"MAKE": str(make), "PATH": "/usr/bin:/bin"}
    return subprocess.run(command, cwd=make.parent, env=environment, capture_output=True, text=True, check=False)


def test_the_failure_of_the_first_half_is_reported_at_the_end(make: Path) -> None:
    done = run(make, "fails", "passes")

    assert done.returncode == 1
    assert done.stdout.splitlines()[-4:] == [
        "passes | ========= 2 passed in 3 s =========",
        "make fails failed with status 1:",
        "  FAILED tests/test_a.py::test_one - AssertionError: 1 is not 2",
        "  ========= 1 failed, 1 passed in 2 s =========",
    ]


def test_no_more_targets_run_at_once_than_asked_for(make: Path) -> None:
    done = run(make, "--at-once=1", "first", "second")

    assert (done.returncode, done.stdout) == (0, "second | it has ended\n")
