"""The YAML in the documentation and in examples/ that users are asked to write."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[3]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
_BLOCK = re.compile(r"^```ya?ml\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Written:
    """One YAML document: `where` is its file and line."""

    where: str
    content: dict[str, Any]

    @property
    def is_manifest(self) -> bool:
        return "kind" in self.content


def blocks_of_pages() -> Iterator[Written]:
    for page in PAGES:
        text = page.read_text()
        for block in _BLOCK.finditer(text):
            line = text.count("\n", 0, block.start()) + 1
            yield from _documents(block[1], f"{page.relative_to(ROOT)}:{line}")


def manifests_of_examples() -> Iterator[Written]:
    """Return the files of examples/ but values for the chart and settings of `tinsmith train`."""
    for file in sorted(ROOT.glob("examples/*.y*ml")):
        if not file.name.startswith("values-"):
            yield from _documents(file.read_text(), str(file.relative_to(ROOT)))


def _documents(text: str, where: str) -> Iterator[Written]:
    for content in yaml.safe_load_all(text):
        yield Written(where, content)
