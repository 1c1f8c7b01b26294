"""The Dockerfiles of the images for GPUs, whose bases of tens of gigabytes no test has."""

from __future__ import annotations

import ast
import re
import shlex
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from images.sources import GPU_IMAGES, ROOT, Image
from packaging.requirements import Requirement

MODULES = {"grpc_health": "grpcio-health-checking"}
"""Packages whose module has another name."""


@dataclass(frozen=True)
class OnABase:
    """engine: whose ranks the base has, as versions.toml and the requirements name it."""

    engine: str

    @property
    def image(self) -> Image:
        return GPU_IMAGES[f"trainer-{self.engine}"]

    @property
    def versions(self) -> dict[str, Any]:
        versions = tomllib.loads((ROOT / "trainer_image" / "versions.toml").read_text())
        own: dict[str, Any] = versions[self.engine]
        return own

    @property
    def requirements(self) -> Path:
        return ROOT / "dev" / "requirements" / f"{self.engine}-image.txt"

    @property
    def brought(self) -> set[str]:
        python = self.versions["python"]
        return {*python["brings"], *python.get("brings_to_ranks", ())}

    def lines(self, instruction: str) -> list[str]:
        return [" ".join(words[1:]) for words in self.image.instructions if words[0] == instruction]

    def environment(self) -> dict[str, str]:
        return _pairs(self.lines("ENV"))

    def labels(self) -> dict[str, str]:
        return _pairs(self.lines("LABEL"))

    def installed(self) -> set[str]:
        found = re.findall(r"^\w.*", self.requirements.read_text(), re.M)
        return {Requirement(line.removesuffix("\\")).name for line in found}


def _pairs(lines: list[str]) -> dict[str, str]:
    return dict(word.split("=", 1) for line in lines for word in shlex.split(line))


def imported_by_the_worker() -> set[str]:
    """Return the top-level names of everything that the worker's modules import, at any depth."""
    found: set[str] = set()
    for package in ("trainer_image/tinsmith_trainer", "rpc/tinsmith_rpc"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Import):
                    found |= {name.name.partition(".")[0] for name in node.names}
                if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                    found.add(node.module.partition(".")[0])
    return found - sys.stdlib_module_names - {"tinsmith_trainer", "tinsmith_rpc"}
