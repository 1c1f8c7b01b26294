"""Rehearse `make gpu-run` on this machine's CPU, in the packages of an image of PyTorch for GPUs: `make gpu-rehearsal`.

A borrowed machine gives minutes, so its packages are tried here first: an environment of what such an image has, with
the wheels of `make gpu-wheels` before it. Both are in the project's cache. gpu_rehearsal_steps.py runs there.
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

    The caller's packages stay out of it. A GPU stays out of sight: `libraries` are another PyTorch's, which a CPU never
    calls. With a thread for each of two busy cores the benchmark in float32 took 120 s, and 25 s with one.
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
    """Return the interpreter of the environment, which is made where the cache has none. Raises CannotRun."""
    packages = package_environment.GPU_LOOKALIKE
    if package_environment.main([packages.name]):
        raise CannotRun(f"the environment of {packages.lock.name} is missing; the lines above say why")
    return package_environment.environment_directory(packages) / "bin" / "python"


def cached_wheels() -> Path:
    """Return the folder of the lock's wheels, which are downloaded where the cache has none. Raises CannotRun."""
    folder = package_environment.directory_for(WHEELS, gpu_wheels.LOCK, gpu_wheels.PYTHON_VERSION)
    package_environment.make_environment(folder, gpu_wheels.download)
    package_environment.remove_unused(folder.parent, time.time())
    return folder


def rehearse() -> int:
    """Return the exit status. Raises CannotRun where the environment or the wheels cannot be had."""
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
