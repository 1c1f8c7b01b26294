"""Rehearse `make gpu-run` on this machine's CPU, with the packages of a PyTorch image for GPUs: `make gpu-rehearsal`.

A borrowed GPU machine is available only for minutes, so the packages are first tried on this machine. The environment
has the packages of a PyTorch image. The wheels of `make gpu-wheels` take precedence over the packages of the image. The
environment and the wheels are in the project's cache. The script gpu_rehearsal_steps.py runs in the environment.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import gpu_wheels
import package_environment
from commits import CannotRun
from gpu_rehearsal_steps import line

SCRIPTS = Path(__file__).parent
STEPS = SCRIPTS / "gpu_rehearsal_steps.py"
WHEELS = "gpu-wheels"


def environment(inherited: Mapping[str, str], libraries: str) -> dict[str, str]:
    """Return the environment variables of the rehearsal.

    The variables hide the caller's packages and any GPU. `libraries` are the GPU libraries that belong to another
    PyTorch. On a CPU, PyTorch never calls GPU libraries. One thread is used, because on two busy cores the float32
    benchmark took 120 s with two threads and 25 s with one thread.
    """
    return {
        **inherited,
        "PYTHONPATH": "",
        "LD_LIBRARY_PATH": libraries,
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }


def image_python() -> Path:
    """Return the interpreter of the environment.

    If the environment is not in the cache, make the environment. Raises CannotRun.
    """
    packages = package_environment.GPU_LOOKALIKE
    if package_environment.main([packages.name]):
        raise CannotRun(f"the environment of {packages.lock.name} is missing; the lines above say why")
    return package_environment.environment_directory(packages) / "bin" / "python"


def cached_wheels() -> Path:
    """Return the folder with the wheels of the lock. Download the wheels that are not in the cache.

    Raises CannotRun.
    """
    folder = package_environment.directory_for(WHEELS, gpu_wheels.LOCK, gpu_wheels.PYTHON_VERSION)
    package_environment.make_environment(folder, gpu_wheels.download)
    package_environment.remove_unused(folder.parent, time.time())
    return folder


def rehearse() -> int:
    """Run the rehearsal, and return the exit status.

    Raises CannotRun if the environment or the wheels cannot be made.
    """
    started = time.monotonic()
    python = image_python()
    count = len(list(python.parents[1].glob("lib/*/site-packages/*.dist-info")))
    print(line("environment", time.monotonic() - started, f"{count} packages"), flush=True)
    begun = time.monotonic()
    wheels = cached_wheels()
    print(line("wheels", time.monotonic() - begun, f"{len(list(wheels.glob('*.whl')))} wheels"), flush=True)
    variables = environment(os.environ, package_environment.lent_libraries())
    status = subprocess.run([python, STEPS, "--wheels", wheels], env=variables, check=False).returncode
    print(line("total", time.monotonic() - started, "failed" if status else "passed"))
    return status


def main(arguments: Sequence[str] | None = None) -> int:
    argparse.ArgumentParser(description=__doc__).parse_args(arguments)
    try:
        return rehearse()
    except CannotRun as error:
        print(f"gpu-rehearsal: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
