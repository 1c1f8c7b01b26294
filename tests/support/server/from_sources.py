"""The `tinsmith` command of this source tree, on a machine where the project is not installed."""

from __future__ import annotations

import os
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[3]
COMMAND = (sys.executable, "-m", "tinsmith")


def path_of_children(folder: Path) -> dict[str, str]:
    """Return the PYTHONPATH with which a child process finds the command, tests and packages of this process.

    `folder` gets the project's metadata, because the command finds its subcommands in metadata.
    """
    write_metadata(folder)
    inherited = os.environ.get("PYTHONPATH", "")
    return {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT / "tests"), inherited])}


def write_metadata(folder: Path) -> None:
    """Write the part of an installation that names the version and the subcommands."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    name, version = project["name"], project["version"]
    metadata = folder / f"{name}-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = [
        line
        for group, points in project["entry-points"].items()
        for line in (f"[{group}]", *(f"{point} = {target}" for point, target in points.items()))
    ]
    (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n")
