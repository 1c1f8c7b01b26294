"""Make an environment for each generation of the tinker SDK, once: `make sdk-environments`.

Versions on the command line replace the list of generations. The dependencies of an SDK have the versions in
dev/requirements/dev.txt, so that new releases of dependencies do not change the tests. All environments share one copy
of PyTorch, the largest package.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from package_environment import directory_for, found_uv, make_environment, remove_unused
from sdk_generations import TESTED

REQUIREMENTS = Path(__file__).parents[1] / "requirements"
LOCK = REQUIREMENTS / "dev.txt"
OVERRIDES = REQUIREMENTS / "sdk-generations-overrides.txt"
KIND = "sdk-generations"
PYTORCH = "torch"
OF_THE_SDK = ("tinker==", "tinker-cookbook==")


def environment_directory(package: str, lock: Path = LOCK, python: str = sys.version) -> Path:
    """Return the directory of the environment for an SDK version, or for PyTorch."""
    return directory_for(f"{KIND}/{package}", lock, python + OVERRIDES.read_text())


def make_sdk_environment(version: str) -> Path:
    """Make the environment for this version of the SDK.

    Raises CalledProcessError if this version cannot be installed.
    """
    pytorch = environment_directory(PYTORCH)
    make_environment(pytorch, partial(_install, requirement=PYTORCH, options=()))
    environment = environment_directory(version)
    make_environment(environment, partial(_install_sdk, version=version, pytorch=pytorch))
    return environment


def _install_sdk(environment: Path, version: str, pytorch: Path) -> None:
    _install(environment, f"tinker=={version}", ("--override", str(OVERRIDES)))
    # PyTorch's folder comes after the environment's own packages, which take precedence.
    (site_packages(environment) / "pytorch.pth").write_text(f"{site_packages(pytorch)}\n")


def _install(environment: Path, requirement: str, options: Sequence[str]) -> None:
    uv = found_uv()
    _run(uv, "venv", "--quiet", "--python", sys.executable, str(environment))
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        constraints.write(without_sdk(LOCK.read_text()))
        constraints.flush()
        python = f"{environment}/bin/python"
        # The overrides in pyproject.toml are for the current SDK.
        alone = ("pip", "install", "--quiet", "--no-config", "--python", python)
        _run(uv, *alone, "-c", constraints.name, *options, requirement)


def without_sdk(lock: str) -> str:
    """Return the lock without the SDK and without the packages that depend on the SDK."""
    packages = re.split(r"(?m)^(?=[A-Za-z0-9])", lock)
    return "".join(package for package in packages if not package.startswith(OF_THE_SDK))


def site_packages(environment: Path) -> Path:
    return environment / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


def main(arguments: Sequence[str]) -> int:
    """Make the environments, and return the exit status."""
    started = time.monotonic()
    try:
        made = [make_sdk_environment(version) for version in arguments or TESTED]
    except (subprocess.CalledProcessError, OSError) as error:
        print(f"an SDK cannot be installed on this machine: {error}", file=sys.stderr)
        return 1
    folder = made[0].parents[1]
    for of_one_version in folder.iterdir():
        remove_unused(of_one_version, time.time())
    print(f"{len(made)} SDKs are in {folder}, after {time.monotonic() - started:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
