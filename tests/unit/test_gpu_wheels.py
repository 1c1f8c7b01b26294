"""`make gpu-wheels`: what a machine without network is brought, and no more than it takes."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import gpu_wheels
import pytest
from commits import CannotRun

PINNED = re.compile(r"^([a-z0-9-]+)==([^ ]+)", re.M)


def pinned_in(lock: str) -> dict[str, str]:
    return dict(PINNED.findall((gpu_wheels.ROOT / "requirements" / lock).read_text()))


def test_the_wheels_have_the_versions_that_the_tests_are_run_with() -> None:
    tests, wheels = pinned_in("dev.txt"), pinned_in(gpu_wheels.LOCK.name)
    assert wheels
    assert wheels == {name: tests[name] for name in wheels}


def test_what_travels_are_the_files_that_git_does_not_ignore(tmp_path: Path) -> None:
    for name, size in {"kept": 10, "new": 200, "ignored": 3000}.items():
        (tmp_path / name).write_bytes(bytes(size))
    (tmp_path / ".gitignore").write_text("ignored\n")
    for command in (["init"], ["add", "kept"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True, capture_output=True)
    assert gpu_wheels.tree_bytes(tmp_path) == 10 + 200 + len("ignored\n")


def test_the_command_that_is_printed_names_wheels_and_commit(tmp_path: Path) -> None:
    wheel = tmp_path / "a.whl"
    wheel.write_bytes(bytes(gpu_wheels.MIB))
    said = gpu_wheels.told([wheel], 2 * gpu_wheels.MIB, "0123abc")
    assert "1 wheels of 1.0 MiB in .wheels, beside a tree of 2.0 MiB" in said
    assert "python3 scripts/gpu_run.py --wheels .wheels --commit 0123abc --out RESULTS" in said


def test_more_than_may_travel_is_an_error_that_says_what_to_take_away(tmp_path: Path) -> None:
    wheel = tmp_path / "a.whl"
    wheel.write_bytes(bytes(gpu_wheels.MIB))
    with pytest.raises(CannotRun, match="64 MiB that may travel: take a package"):
        gpu_wheels.told([wheel], gpu_wheels.MOST_BYTES, "0123abc")


def test_the_folder_of_wheels_is_ignored() -> None:
    ignored = ["git", "check-ignore", "--quiet", f"{gpu_wheels.FOLDER}/a.whl"]
    assert subprocess.run(ignored, cwd=gpu_wheels.ROOT, check=False).returncode == 0
