"""`tinsmith version`: what is installed here."""

from __future__ import annotations

import json
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

import typer

from tinsmith.console import make_console

REPORTED_PACKAGES = ("tinker", "tinker-cookbook", "torch", "transformers", "peft")


def print_version(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, for scripts.")] = False,
) -> None:
    """Print the versions of Tinsmith, Python and the packages that matter to both."""
    versions = installed_versions()
    if as_json:
        print(json.dumps(versions))
        return
    console = make_console()
    for name, found in versions.items():
        console.print(f"{name:<16} {found or 'not installed'}")


def installed_versions() -> dict[str, str | None]:
    """Package name to version, None where it is not installed. Imports none of them."""
    here = {"tinsmith": _version_of("tinsmith"), "python": platform.python_version()}
    return here | {name: _version_of(name) for name in REPORTED_PACKAGES}


def _version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
