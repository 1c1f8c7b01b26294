"""Requirements of tests: where one is missing the test is skipped, or fails where every test is asked for."""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path

import pytest

REQUIRE_ALL = "TINSMITH_REQUIRE_ALL"


class InstalledBy(StrEnum):
    """The make targets that install what tests need. `.ci/run` runs every one of them."""

    DEBIAN_PACKAGES = "debian-packages"
    VENV = "venv"
    PACKAGE_ENVIRONMENTS = "package-environments"
    SDK_ENVIRONMENTS = "sdk-environments"
    CONSOLE_PACKAGES = "console-packages"


def require(condition: bool, lack: str, target: InstalledBy | None = None) -> None:
    """Skip the test unless `condition` holds; with TINSMITH_REQUIRE_ALL=1, fail it.

    `lack` says what is missing. `target` installs it; None stands for what only the machine can have: a GPU, Go, root.
    """
    if condition:
        return
    sentence = lack if target is None else f"{lack.rstrip('.')}: run `make {target}`."
    if os.environ.get(REQUIRE_ALL) == "1":
        pytest.fail(f"{sentence} ({REQUIRE_ALL}=1 asks for every test)")
    pytest.skip(sentence)


def require_environment(name: str) -> Path:
    """Return the folder of the package environment `name`, and skip the test, or fail it, where it is not installed.

    Only the environments that `make package-environments` installs can be asked for.
    """
    # Here, since the worker's tests also run in its image, which has no scripts.
    from package_environment import FOR_TESTS, KNOWN, environment_directory, is_complete

    packages = KNOWN[name]
    assert packages in FOR_TESTS, f"`make package-environments` does not install {name}: add it to FOR_TESTS"
    environment = environment_directory(packages)
    require(is_complete(environment), f"{packages.title} is not installed", InstalledBy.PACKAGE_ENVIRONMENTS)
    return environment
