"""Rules about the files themselves, which no other tool checks."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
from support.requirements import require

ROOT = Path(__file__).parents[2]
LONGEST_FILE_LINES = 600
GENERATED = "_pb2"

# A product file below the floor goes into its only importer or its subject; above the ceiling it is two; a folder with
# more files gets rooms by subject.
PRODUCT = {
    "operator": "tinsmith_operator",
    "api_server": "tinsmith_server",
    "trainer_image": "tinsmith_trainer",
    "client": "tinsmith",
}
SHORTEST_PRODUCT_LINES = 50
MOST_FILES_IN_A_FOLDER = 18
LOADED_BY_NAME = {"trainer_image/tinsmith_trainer/engines/nemo_rl/actor.py"}
"""Ray imports it in NeMo RL's environment, whose packages its neighbours must not import."""

REGISTRY = re.compile(r"//[\w.-]*(pypi|pythonhosted|npmjs|rubygems|crates)\.(org|io)|//proxy\.golang", re.IGNORECASE)
# The home of the images' user is no machine's, and neither is where Miles' image has its sources.
MACHINE_PATH = re.compile(r"(?<![\w.])/(work|root(?!/(?:miles|Megatron-LM)\b)|home/(?!tinsmith/)\w+)/\w")


def repository_files() -> list[Path]:
    """Tracked files, and new ones that are not ignored."""
    require(shutil.which("git") is not None, "git is not installed.")
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


def test_no_file_has_a_path_of_a_developers_machine() -> None:
    assert places(MACHINE_PATH) == []


@pytest.mark.parametrize("lock", sorted(ROOT.glob("dev/requirements/*.txt")), ids=lambda path: path.name)
def test_a_lock_names_packages_and_hashes_and_no_addresses(lock: Path) -> None:
    lines = lock.read_text().splitlines()
    assert not [line for line in lines if "://" in line or line.lstrip().startswith(("--index", "--find", "--extra"))]


def test_every_package_of_the_lock_has_a_hash() -> None:
    entries = re.split(r"\n(?=\w)", (ROOT / "dev" / "requirements" / "dev.txt").read_text())
    assert len(entries) > 100
    assert [entry.splitlines()[0] for entry in entries if "--hash=sha256:" not in entry] == []


def test_no_python_file_is_too_long_to_read_at_a_sitting() -> None:
    lengths = {
        file.relative_to(ROOT).as_posix(): len(file.read_text().splitlines())
        for file in repository_files()
        if file.suffix == ".py" and GENERATED not in file.name
    }
    assert {name: length for name, length in lengths.items() if length > LONGEST_FILE_LINES} == {}


@cache
def product_lengths() -> dict[str, int]:
    """Return the lines of each Python file. An `__init__.py` and alembic's `env.py` may be as short as they like."""
    return {
        file.relative_to(ROOT).as_posix(): len(file.read_text().splitlines())
        for file in repository_files()
        if file.suffix == ".py" and file.name not in ("__init__.py", "env.py") and is_product(file.relative_to(ROOT))
    }


def is_product(path: Path) -> bool:
    return any(path.is_relative_to(Path(folder) / package) for folder, package in PRODUCT.items())


def test_a_product_file_is_long_enough_to_be_one() -> None:
    short = {name for name, length in product_lengths().items() if length < SHORTEST_PRODUCT_LINES}
    assert {name for name in short if not is_program(ROOT / name)} == LOADED_BY_NAME, "merge it into its importer"


def is_program(file: Path) -> bool:
    return file.name == "__main__.py" or 'if __name__ == "__main__":' in file.read_text()


def test_a_product_folder_is_about_one_subject() -> None:
    folders = Counter(str(Path(name).parent) for name in product_lengths())
    assert {name for name, files in folders.items() if files > MOST_FILES_IN_A_FOLDER} == set(), "make rooms by subject"


def shell_scripts() -> list[Path]:
    candidates = [*ROOT.glob("dev/scripts/*"), ROOT / ".ci" / "run"]
    return sorted(path for path in candidates if path.is_file() and "bash" in path.read_text().partition("\n")[0])


@pytest.mark.parametrize("script", shell_scripts(), ids=lambda path: path.name)
def test_a_script_can_be_executed_and_stops_at_the_first_error(script: Path) -> None:
    assert script.stat().st_mode & 0o111
    assert "set -euo pipefail" in script.read_text()
