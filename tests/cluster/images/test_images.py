"""The built images, each as a pod would run it: uid 65532, a read-only root, an empty home."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from images.archives import build_images, find_builder
from images.builder import Program
from images.commands import ImageError
from images.running import run_in_image
from images.sources import IMAGES
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from support.requirements import require

# A first build installs everything.
pytestmark = [pytest.mark.timeout(1500), pytest.mark.parametrize("name", IMAGES)]

PACKAGES = {
    "trainer": {"tinsmith_trainer", "tinsmith_rpc"},
    "api-server": {"tinsmith", "tinsmith_server", "tinsmith_rpc"},
    "operator": {"tinsmith_operator", "tinsmith_rpc"},
}
LARGEST_MB = {"trainer": 1500, "api-server": 450, "operator": 400}

# The rest of tinsmith is a client's, and needs a client's packages. Engines on ranks have images of their own.
IMPORT_ALL = """
import importlib, json, pkgutil, sys
broken = {}
for package in sys.argv[1:]:
    for module in pkgutil.walk_packages(importlib.import_module(package).__path__, package + "."):
        of_ranks = any(f".engines.{name}" in module.name for name in ("megatron", "miles", "nemo_rl"))
        if not module.name.endswith(("__main__", ".asgi")) and not of_ranks:
            try:
                importlib.import_module(module.name)
            except Exception as error:
                broken[module.name] = repr(error)
print(json.dumps(broken))
"""


@pytest.fixture(autouse=True, scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory) -> None:
    try:
        find_builder(tmp_path_factory.mktemp("unused"))
    except ImageError as error:
        require(False, str(error))


def python(name: str, program: str, *arguments: str) -> Any:
    """Return the JSON that the program printed."""
    finished = run_in_image(name, Program(["python3", "-c", program, *arguments]))
    assert finished.returncode == 0, finished.stderr
    return json.loads(finished.stdout.splitlines()[-1])


def shell(name: str, command: str) -> str:
    finished = run_in_image(name, Program(["sh", "-c", command]))
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def test_it_runs_as_any_user_and_writes_only_to_tmp_and_home(name: str) -> None:
    program = """
import json, os, pathlib
def writable(place):
    try:
        (pathlib.Path(place) / "probe").write_text("")
    except OSError:
        return False
    return True
print(json.dumps({"ids": [os.getuid(), os.getgid()], "home": os.environ["HOME"], "cwd": os.getcwd(),
    "writable": [place for place in ("/", "/opt/tinsmith", "/tmp", "/home/tinsmith", "/var/lib") if writable(place)]}))
"""
    assert python(name, program) == {
        "ids": [65532, 65532],
        "home": "/home/tinsmith",
        "cwd": "/home/tinsmith",
        "writable": ["/tmp", "/home/tinsmith"],
    }


def test_every_module_of_its_packages_can_be_imported(name: str) -> None:
    assert python(name, IMPORT_ALL, *sorted(PACKAGES[name] - {"tinsmith"})) == {}


def test_it_holds_its_own_packages_and_no_others(name: str) -> None:
    program = """
import importlib.util, json, sys
print(json.dumps([package for package in sys.argv[1:] if importlib.util.find_spec(package)]))
"""
    packages = sorted(set.union(*PACKAGES.values()))
    assert set(python(name, program, *packages)) == PACKAGES[name]
    heavy = ["torch", "transformers", "peft", "numpy"]
    assert python(name, program, *heavy) == (heavy if name == "trainer" else [])
    assert python(name, program, "pip", "hatchling", "pytest") == []


def test_its_installed_packages_agree_with_each_other(name: str) -> None:
    """Locks are installed without resolving, and the trainer's torch and numpy come from Debian."""
    program = """
import json
from importlib.metadata import distributions
tinsmiths = distributions(path=["/opt/tinsmith/lib/python3.13/site-packages"])
print(json.dumps({
    "versions": [(found.name, found.version) for found in distributions()],
    "wants": [(found.name, line) for found in tinsmiths for line in found.requires or () if found.name != "tinsmith"],
}))
"""
    installed = python(name, program)
    versions: dict[str, str] = {}
    for package, version in installed["versions"]:
        # What comes first on the path is what is imported.
        versions.setdefault(canonicalize_name(package), version)
    assert len(installed["wants"]) > 20
    assert [f"{package} wants {line}" for package, line in installed["wants"] if not _is_met(line, versions)] == []


def _is_met(line: str, versions: dict[str, str]) -> bool:
    requirement = Requirement(line)
    python_313 = {"extra": "", "python_version": "3.13", "python_full_version": "3.13.5"}
    if requirement.marker is not None and not requirement.marker.evaluate(python_313):
        return True
    version = versions.get(canonicalize_name(requirement.name))
    return version is not None and requirement.specifier.contains(version, prereleases=True)


def test_its_sources_are_compiled_so_that_a_read_only_root_costs_no_time(name: str) -> None:
    sources = shell(name, "find /opt/tinsmith/lib/python3.13/site-packages/tinsmith_* -name '*.py' | wc -l")
    compiled = shell(name, "find /opt/tinsmith/lib/python3.13/site-packages/tinsmith_* -name '*.pyc' | wc -l")
    assert int(compiled) == int(sources) > 3


def test_the_image_has_no_settings_of_the_build_machine(name: str) -> None:
    variables = shell(name, "env | cut -d= -f1").split()
    assert [name for name in variables if name.lower().endswith("_proxy") or name.startswith(("PIP_", "SSL_"))] == []
    assert shell(name, "find /run/secrets /var/lib/apt/lists /var/cache -type f") == ""


def test_it_is_no_larger_than_it_has_to_be(name: str) -> None:
    archive = build_images([IMAGES[name]])[name]
    assert archive.path.stat().st_size / 1e6 < LARGEST_MB[name]


def test_an_unchanged_checkout_is_not_built_again(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = build_images([IMAGES[name]])[name]

    def no_builder(_cache: Path) -> None:
        raise AssertionError("something was built")

    monkeypatch.setattr("images.archives.find_builder", no_builder)
    assert build_images([IMAGES[name]])[name] == archive


def test_its_program_starts(name: str) -> None:
    words = {
        "trainer": ["python3", "-m", "tinsmith_trainer", "--help"],
        "api-server": ["tinsmith", "serve", "--help"],
        "operator": ["python3", "-c", "import tinsmith_operator.__main__"],
    }
    finished = run_in_image(name, Program(words[name]))
    assert finished.returncode == 0, finished.stderr
