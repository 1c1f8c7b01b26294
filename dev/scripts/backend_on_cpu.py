"""The tests of a GPU backend, which use the backend's own sources on the CPU of this machine.

The sources are checkouts at the commits in trainer_image/versions.toml, because no package index contains the sources.
package_environment.py installs the packages that the sources import.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import package_environment

ROOT = Path(__file__).parents[2]
VERSIONS = ROOT / "trainer_image" / "versions.toml"
SHARED_SHIMS = ROOT / "tests" / "support" / "on_cpu"


@dataclass(frozen=True, slots=True)
class Source:
    """The repository of a backend: the dotted section in versions.toml, and the folder for Python's import path."""

    section: str
    variable: str
    imports: str = "."

    @property
    def flag(self) -> str:
        return f"--{self.variable.lower().replace('_', '-')}"


@dataclass(frozen=True, slots=True)
class Backend:
    """A backend.

    `shims`: the folder with a sitecustomize that lets the sources run on a CPU. `marker`: the pytest marker of the
    tests in `tests` that need the backend.
    """

    title: str
    sources: tuple[Source, ...]
    packages: package_environment.Packages
    shims: Path
    marker: str
    tests: str


class SourceMissing(Exception):
    """An error for a source that is missing or has another commit.

    The message names the missing source, and the commit that is needed.
    """


def pinned(source: Source) -> dict[str, Any]:
    """Return the entries of versions.toml for this source."""
    section = tomllib.loads(VERSIONS.read_text())
    for name in source.section.split("."):
        section = section[name]
    return section


def check_source(source: Source, path: str, pin: Mapping[str, str]) -> Path:
    """Return the checkout. The commit of the checkout must be the commit in `pin`. Raises SourceMissing."""
    clone = f"git clone {pin['repository']} && git checkout {pin['commit']}"
    if not path:
        raise SourceMissing(f"{source.variable} is not given: the path of a checkout made by `{clone}`.")
    checkout = Path(path).expanduser().resolve()
    asked = subprocess.run(
        ["git", "-C", str(checkout), "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    )
    found = asked.stdout.strip()
    if asked.returncode or found != pin["commit"]:
        what = f"is at {found}" if not asked.returncode else "is no checkout of git's"
        raise SourceMissing(f"{source.variable}={path} {what}, and the tests are for {pin['commit']}: `{clone}`.")
    return checkout


def environment_of_tests(backend: Backend, checkouts: Sequence[Path]) -> dict[str, str]:
    """Return the environment for the tests.

    The shims come first on the path, because Python imports only the first sitecustomize.
    """
    imports = [backend.shims, SHARED_SHIMS, *checkouts, ROOT / "trainer_image", ROOT / "rpc"]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(str(path) for path in imports),
        "LD_LIBRARY_PATH": package_environment.lent_libraries(),
        "OMP_NUM_THREADS": "1",
        # A virtual machine may offer AMX, which oneDNN uses for bfloat16, but kill a process that uses it.
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE",
        "TORCH_COMPILE_DISABLE": "1",  # otherwise each rank compiles C++ for Megatron's fused operations
        "WANDB_MODE": "disabled",
    }


def run_tests(backend: Backend, arguments: Sequence[str]) -> int:
    """Run pytest with all arguments that do not name a source.

    Return the exit status of pytest, or 2 if a source is missing.
    """
    parser = argparse.ArgumentParser(description=f"Runs the tests of {backend.title} itself on this machine's CPU.")
    for source in backend.sources:
        parser.add_argument(source.flag, dest=source.variable, default="", help=f"a checkout of {source.section}")
    options, for_pytest = parser.parse_known_args(arguments)
    try:
        checkouts = [
            check_source(source, getattr(options, source.variable), pinned(source)) / source.imports
            for source in backend.sources
        ]
    except SourceMissing as missing:
        print(missing, file=sys.stderr)
        return 2
    if failed := package_environment.main([backend.packages.name]):
        return failed
    python = package_environment.environment_directory(backend.packages) / "bin" / "python"
    # Hundreds of third-party modules cause these warnings, and this project cannot fix them.
    pytest = [str(python), "-m", "pytest", "-W", "ignore", "-m", backend.marker, "-p", "no:cacheprovider"]
    return subprocess.run(
        [*pytest, *(for_pytest or [backend.tests])],
        cwd=ROOT,
        env=environment_of_tests(backend, checkouts),
        check=False,
    ).returncode
