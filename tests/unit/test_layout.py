"""Rules about the files themselves, which no other tool checks."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from support.requirements import require

ROOT = Path(__file__).parents[2]
LONGEST_FILE_LINES = 500
GENERATED = "_pb2"

REGISTRY = re.compile(r"//[\w.-]*(pypi|pythonhosted|npmjs|rubygems|crates)\.(org|io)|//proxy\.golang", re.IGNORECASE)
# The home of the images' user is no machine's.
MACHINE_PATH = re.compile(r"(?<![\w.])/(work|root|home/(?!tinsmith/)\w+)/\w")


def repository_files() -> list[Path]:
    """Tracked files, and new ones that are not ignored."""
    require(shutil.which("git") is not None, "git is not installed: `apt-get install git`.")
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def places(pattern: re.Pattern[str], *, except_file: Path = Path(__file__)) -> list[str]:
    return [
        f"{file.relative_to(ROOT)}:{number}: {line.strip()[:100]}"
        for file in repository_files()
        if file != except_file
        for number, line in enumerate(file.read_text(errors="replace").splitlines(), 1)
        if pattern.search(line)
    ]


def test_no_file_names_a_package_registry() -> None:
    assert places(REGISTRY) == []


def test_no_file_holds_a_path_of_somebodys_machine() -> None:
    assert places(MACHINE_PATH) == []


@pytest.mark.parametrize("lock", sorted(ROOT.glob("requirements/*.txt")), ids=lambda path: path.name)
def test_a_lock_names_packages_and_hashes_and_no_addresses(lock: Path) -> None:
    lines = lock.read_text().splitlines()
    assert not [line for line in lines if "://" in line or line.lstrip().startswith(("--index", "--find", "--extra"))]


def test_every_package_of_the_lock_has_a_hash() -> None:
    entries = re.split(r"\n(?=\w)", (ROOT / "requirements" / "dev.txt").read_text())
    assert len(entries) > 100
    assert [entry.splitlines()[0] for entry in entries if "--hash=sha256:" not in entry] == []


def test_no_python_file_is_too_long_to_read_at_a_sitting() -> None:
    lengths = {
        file.relative_to(ROOT).as_posix(): len(file.read_text().splitlines())
        for file in repository_files()
        if file.suffix == ".py" and GENERATED not in file.name
    }
    assert {name: length for name, length in lengths.items() if length > LONGEST_FILE_LINES} == {}


def shell_scripts() -> list[Path]:
    candidates = [*ROOT.glob("scripts/*"), ROOT / ".ci" / "run"]
    return sorted(path for path in candidates if path.is_file() and "bash" in path.read_text().partition("\n")[0])


@pytest.mark.parametrize("script", shell_scripts(), ids=lambda path: path.name)
def test_a_script_can_be_executed_and_stops_at_the_first_error(script: Path) -> None:
    assert script.stat().st_mode & 0o111
    assert "set -euo pipefail" in script.read_text()
