"""Rules about the files themselves, which no other tool checks."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from support.requirements import require

ROOT = Path(__file__).parents[2]
LONGEST_FILE_LINES = 600
GENERATED = "_pb2"

# A product file below the floor goes into its only importer or its subject; above the ceiling it is two; a folder with
# more files gets rooms by subject. The exceptions say why.
PRODUCT = {
    "operator": "tinsmith_operator",
    "api_server": "tinsmith_server",
    "trainer_image": "tinsmith_trainer",
    "client": "tinsmith",
    "dev/testcluster": "testcluster",
}
SHORTEST_PRODUCT_LINES = 60
MOST_FILES_IN_A_FOLDER = 18

SHARED = "several modules import it, and it is no part of one of them alone"
"""Checked below."""
PROGRAM = "a program of its own"
ROOM = "the same file in session/ and pool/, where a reader looks for it"
FOR_TESTS = "tests and the demo import it"
COMMAND = "one command a file"
CHOICE = "a package's public choice, which its __init__ exports"

WHY_SHORT = {
    "client/tinsmith/__main__.py": PROGRAM,
    "operator/tinsmith_operator/errors.py": SHARED,
    "operator/tinsmith_operator/kube/depth.py": SHARED,
    "dev/testcluster/testcluster/commands.py": SHARED,
    "dev/testcluster/testcluster/errors.py": SHARED,
    "dev/testcluster/testcluster/policies/plugin.py": PROGRAM,
    "dev/testcluster/testcluster/ports.py": FOR_TESTS,
    "dev/testcluster/testcluster/project_images.py": FOR_TESTS,
    "dev/testcluster/testcluster/record.py": SHARED,
    "dev/testcluster/testcluster/tar_files.py": FOR_TESTS,
    "trainer_image/tinsmith_trainer/__main__.py": PROGRAM,
    "trainer_image/tinsmith_trainer/engines/nemo_rl/actor.py": "Ray loads it by name, in another environment",
    "trainer_image/tinsmith_trainer/process/failpoints.py": SHARED,
    "trainer_image/tinsmith_trainer/sampling/builtin/settings.py": CHOICE,
    "trainer_image/tinsmith_trainer/sampling/token_server/supervisor.py": PROGRAM,
    "trainer_image/tinsmith_trainer/wire/unknown_fields.py": SHARED,
}

WHY_FULL: dict[str, str] = {}

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


def test_no_file_holds_a_path_of_somebodys_machine() -> None:
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


def test_a_product_file_is_long_enough_to_be_one_or_says_why() -> None:
    short = {name for name, length in product_lengths().items() if length < SHORTEST_PRODUCT_LINES}
    assert sorted(short - WHY_SHORT.keys()) == [], "merge it into its only importer or its subject, or say why not"


def test_a_product_folder_is_about_one_subject_or_says_why() -> None:
    full = {folder for folder, files in product_folders().items() if files > MOST_FILES_IN_A_FOLDER}
    assert sorted(full - WHY_FULL.keys()) == [], "give it rooms by subject"


def product_folders() -> Counter[str]:
    return Counter(str(Path(name).parent) for name in product_lengths())


def test_no_exception_from_the_sizes_is_left_that_is_not_needed() -> None:
    lengths, folders = product_lengths(), product_folders()
    unneeded = [name for name in WHY_SHORT if not 0 < lengths.get(name, 0) < SHORTEST_PRODUCT_LINES]
    unneeded += [name for name in WHY_FULL if folders[name] <= MOST_FILES_IN_A_FOLDER]
    assert unneeded == [], "remove it from the table"


def test_a_short_file_that_is_said_to_be_shared_has_more_than_one_importer() -> None:
    importers = Counter(imported for name in product_lengths() for imported in set(imports_of(ROOT / name)))
    shared = [name for name, reason in WHY_SHORT.items() if reason is SHARED]
    assert [name for name in shared if importers[module_name(name)] < 2] == [], "merge it into its only importer"


def module_name(name: str) -> str:
    (folder,) = [folder for folder in PRODUCT if name.startswith(f"{folder}/")]
    return ".".join(Path(name).relative_to(folder).with_suffix("").parts)


def imports_of(file: Path) -> Iterator[str]:
    """`from a import b` may import the module `a.b`."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{name.name}" for name in node.names)


def shell_scripts() -> list[Path]:
    candidates = [*ROOT.glob("dev/scripts/*"), ROOT / ".ci" / "run"]
    return sorted(path for path in candidates if path.is_file() and "bash" in path.read_text().partition("\n")[0])


@pytest.mark.parametrize("script", shell_scripts(), ids=lambda path: path.name)
def test_a_script_can_be_executed_and_stops_at_the_first_error(script: Path) -> None:
    assert script.stat().st_mode & 0o111
    assert "set -euo pipefail" in script.read_text()
